// Python face of the kernels: checks addresses, releases the GIL, shares the work out over a pool.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>

#include "bind.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace greedysnake {
namespace {

// Elements a thread takes at a time: half a MiB of state, long enough for prefetching to settle.
constexpr size_t kBlock = 32768;

template <class T>
T* pointer(uintptr_t address, const char* name, size_t count) {
    if (address == 0 && count > 0) {
        throw std::invalid_argument(std::string(name) + " is a null address: pass the address of its memory");
    }
    if (address % alignof(T) != 0) {
        throw std::invalid_argument(std::string(name) + " is at " + std::to_string(address) + ", not a multiple of " +
                                    std::to_string(alignof(T)) + " bytes: align its memory");
    }
    return reinterpret_cast<T*>(address);
}

bool is_bfloat16(const std::string& dtype) {
    if (dtype != "float32" && dtype != "bfloat16") {
        throw std::invalid_argument("dtype \"" + dtype + "\" is not known: use \"float32\" or \"bfloat16\"");
    }
    return dtype == "bfloat16";
}

const void* values_pointer(uintptr_t address, const char* name, bool bfloat16, size_t count) {
    if (bfloat16) return pointer<bf16>(address, name, count);
    return pointer<float>(address, name, count);
}

void run_adamw(ThreadPool& pool, KernelTable::AdamW kernel, const AdamWChunk& chunk, size_t count, double lr,
               double beta1, double beta2, double eps, double weight_decay, int64_t step, double grad_scale) {
    if (step < 1) {
        throw std::invalid_argument("step is " + std::to_string(step) + ": the first step is 1");
    }
    const AdamWScalars scalars = adamw_scalars(lr, beta1, beta2, eps, weight_decay, step, grad_scale);
    pool.parallel_for(count, kBlock, [&](size_t begin, size_t end) { kernel(scalars, chunk, begin, end); });
}

void adamw_split(ThreadPool& pool, const std::string& isa, uintptr_t grad, const std::string& grad_dtype,
                 uintptr_t weight, uintptr_t residual, uintptr_t exp_avg, uintptr_t exp_avg_sq, size_t count, double lr,
                 double beta1, double beta2, double eps, double weight_decay, int64_t step, double grad_scale) {
    const bool bfloat16 = is_bfloat16(grad_dtype);
    const AdamWChunk chunk{
        values_pointer(grad, "grad", bfloat16, count),   pointer<bf16>(weight, "weight", count),
        pointer<int16_t>(residual, "residual", count),   pointer<float>(exp_avg, "exp_avg", count),
        pointer<float>(exp_avg_sq, "exp_avg_sq", count),
    };
    run_adamw(pool, kernels_for(isa).adamw_split[bfloat16], chunk, count, lr, beta1, beta2, eps, weight_decay, step,
              grad_scale);
}

void adamw_fp32(ThreadPool& pool, const std::string& isa, uintptr_t grad, const std::string& grad_dtype,
                uintptr_t weight, uintptr_t exp_avg, uintptr_t exp_avg_sq, size_t count, double lr, double beta1,
                double beta2, double eps, double weight_decay, int64_t step, double grad_scale) {
    const bool bfloat16 = is_bfloat16(grad_dtype);
    const AdamWChunk chunk{
        values_pointer(grad, "grad", bfloat16, count), pointer<float>(weight, "weight", count),         nullptr,
        pointer<float>(exp_avg, "exp_avg", count),     pointer<float>(exp_avg_sq, "exp_avg_sq", count),
    };
    run_adamw(pool, kernels_for(isa).adamw_fp32[bfloat16], chunk, count, lr, beta1, beta2, eps, weight_decay, step,
              grad_scale);
}

void split(ThreadPool& pool, uintptr_t fp32, uintptr_t weight, uintptr_t residual, size_t count,
           const std::string& isa) {
    const KernelTable& kernels = kernels_for(isa);
    const float* from = pointer<float>(fp32, "fp32", count);
    bf16* to_weight = pointer<bf16>(weight, "weight", count);
    int16_t* to_residual = pointer<int16_t>(residual, "residual", count);
    pool.parallel_for(count, kBlock,
                      [&](size_t begin, size_t end) { kernels.split(from, to_weight, to_residual, begin, end); });
}

void join(ThreadPool& pool, uintptr_t weight, uintptr_t residual, uintptr_t fp32, size_t count,
          const std::string& isa) {
    const KernelTable& kernels = kernels_for(isa);
    const bf16* from_weight = pointer<bf16>(weight, "weight", count);
    const int16_t* from_residual = pointer<int16_t>(residual, "residual", count);
    float* to = pointer<float>(fp32, "fp32", count);
    pool.parallel_for(count, kBlock,
                      [&](size_t begin, size_t end) { kernels.join(from_weight, from_residual, to, begin, end); });
}

void to_bfloat16(ThreadPool& pool, uintptr_t fp32, uintptr_t bfloat16, size_t count, const std::string& isa) {
    const KernelTable& kernels = kernels_for(isa);
    const float* from = pointer<float>(fp32, "fp32", count);
    bf16* to = pointer<bf16>(bfloat16, "bf16", count);
    pool.parallel_for(count, kBlock, [&](size_t begin, size_t end) { kernels.to_bfloat16(from, to, begin, end); });
}

void from_bfloat16(ThreadPool& pool, uintptr_t bfloat16, uintptr_t fp32, size_t count, const std::string& isa) {
    const KernelTable& kernels = kernels_for(isa);
    const bf16* from = pointer<bf16>(bfloat16, "bf16", count);
    float* to = pointer<float>(fp32, "fp32", count);
    pool.parallel_for(count, kBlock, [&](size_t begin, size_t end) { kernels.from_bfloat16(from, to, begin, end); });
}

void add_fp32(ThreadPool& pool, uintptr_t dst, uintptr_t src, size_t count, const std::string& isa) {
    const KernelTable& kernels = kernels_for(isa);
    float* to = pointer<float>(dst, "dst", count);
    const float* from = pointer<float>(src, "src", count);
    pool.parallel_for(count, kBlock, [&](size_t begin, size_t end) { kernels.add_fp32(to, from, begin, end); });
}

void sum_of_squares(ThreadPool& pool, uintptr_t address, const std::string& dtype, size_t count,
                    uintptr_t partials_address, size_t granule, const std::string& isa) {
    if (granule == 0) throw std::invalid_argument("granule is 0: give the number of elements per partial");
    const bool bfloat16 = is_bfloat16(dtype);
    const KernelTable::SumOfSquares kernel = kernels_for(isa).sum_of_squares[bfloat16];
    const void* values = values_pointer(address, "values", bfloat16, count);
    double* partials = pointer<double>(partials_address, "partials", count);
    const size_t num_granules = count / granule + (count % granule != 0);
    const size_t granules_per_block = granule < kBlock ? kBlock / granule : 1;
    pool.parallel_for(num_granules, granules_per_block,
                      [&](size_t begin, size_t end) { kernel(values, count, partials, granule, begin, end); });
}

}  // namespace
}  // namespace greedysnake

void bind_kernels(nb::module_& m) {
    using namespace greedysnake;
    using release = nb::call_guard<nb::gil_scoped_release>;

    // A pool that a Python module still holds when the interpreter ends is not a leak worth a page of
    // warnings.
    nb::set_leak_warnings(false);

    nb::class_<ThreadPool>(m, "ThreadPool")
        .def(
            "__init__",
            [](ThreadPool* self, int num_threads, const std::optional<std::vector<int>>& cpus) {
                new (self) ThreadPool(num_threads, cpus.value_or(std::vector<int>{}));
            },
            "num_threads"_a, "cpus"_a = nb::none())
        .def("close", &ThreadPool::close, release())
        .def_prop_ro("num_threads", &ThreadPool::num_threads);

    m.def("available_isas", &available_isas);
    m.def("adamw_split", &adamw_split, "pool"_a, "isa"_a, "grad"_a, "grad_dtype"_a, "weight"_a, "residual"_a,
          "exp_avg"_a, "exp_avg_sq"_a, "count"_a, "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "step"_a,
          "grad_scale"_a, release());
    m.def("adamw_fp32", &adamw_fp32, "pool"_a, "isa"_a, "grad"_a, "grad_dtype"_a, "weight"_a, "exp_avg"_a,
          "exp_avg_sq"_a, "count"_a, "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "step"_a, "grad_scale"_a,
          release());
    m.def("split", &split, "pool"_a, "fp32"_a, "weight"_a, "residual"_a, "count"_a, "isa"_a = "auto", release());
    m.def("join", &join, "pool"_a, "weight"_a, "residual"_a, "fp32"_a, "count"_a, "isa"_a = "auto", release());
    m.def("to_bfloat16", &to_bfloat16, "pool"_a, "fp32"_a, "bf16"_a, "count"_a, "isa"_a = "auto", release());
    m.def("from_bfloat16", &from_bfloat16, "pool"_a, "bf16"_a, "fp32"_a, "count"_a, "isa"_a = "auto", release());
    m.def("add_fp32", &add_fp32, "pool"_a, "dst"_a, "src"_a, "count"_a, "isa"_a = "auto", release());
    m.def("sum_of_squares", &sum_of_squares, "pool"_a, "values"_a, "dtype"_a, "count"_a, "partials"_a,
          "granule"_a = 2048, "isa"_a = "auto", release());

    m.def(
        "crc32c",
        [](uintptr_t address, size_t nbytes, uint32_t seed) {
            return crc32c(pointer<unsigned char>(address, "data", nbytes), nbytes, seed);
        },
        "address"_a, "nbytes"_a, "seed"_a = 0, release());
    m.def(
        "crc32c_portable",
        [](uintptr_t address, size_t nbytes, uint32_t seed) {
            return crc32c_portable(pointer<unsigned char>(address, "data", nbytes), nbytes, seed);
        },
        "address"_a, "nbytes"_a, "seed"_a = 0, release());
    m.def("crc32c_combine", &crc32c_combine, "crc1"_a, "crc2"_a, "nbytes2"_a);
    m.def(
        "memory_pass",
        [](ThreadPool& pool, uintptr_t address, size_t nbytes) {
            memory_pass(pool, pointer<uint64_t>(address, "data", nbytes), nbytes);
        },
        "pool"_a, "address"_a, "nbytes"_a, release());
}
