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

MomentKind moment_kind(const std::string& name) {
    if (name == "float32") return MomentKind::kFloat32;
    if (name == "bfloat16") return MomentKind::kBfloat16;
    if (name == "int8") return MomentKind::kInt8;
    throw std::invalid_argument("moments \"" + name + "\" are not known: use \"float32\", \"bfloat16\" or \"int8\"");
}

void* moment_pointer(uintptr_t address, const char* name, MomentKind kind, size_t count) {
    if (kind == MomentKind::kFloat32) return pointer<float>(address, name, count);
    if (kind == MomentKind::kBfloat16) return pointer<bf16>(address, name, count);
    return pointer<uint8_t>(address, name, count);
}

void adamw(ThreadPool& pool, const std::string& isa, const std::string& moments, uintptr_t grad,
           const std::string& grad_dtype, uintptr_t weight, uintptr_t residual, uintptr_t exp_avg, uintptr_t exp_avg_sq,
           uintptr_t exp_avg_scale, uintptr_t exp_avg_sq_scale, size_t count, uint64_t first, uint32_t seed, double lr,
           double beta1, double beta2, double eps, double weight_decay, int64_t step, double grad_scale) {
    const MomentKind kind = moment_kind(moments);
    const bool bfloat16 = is_bfloat16(grad_dtype);
    const bool split = residual != 0;
    const bool scaled = kind == MomentKind::kInt8;
    static_assert(kBlock % kMomentGroup == 0);
    if (scaled && count % kMomentGroup != 0) {
        throw std::invalid_argument("count is " + std::to_string(count) + ": int8 moments come in groups of " +
                                    std::to_string(kMomentGroup) + ", give a multiple of that");
    }
    if (step < 1) {
        throw std::invalid_argument("step is " + std::to_string(step) + ": the first step is 1");
    }
    const AdamWChunk chunk{
        .grad = values_pointer(grad, "grad", bfloat16, count),
        .weight = split ? static_cast<void*>(pointer<bf16>(weight, "weight", count))
                        : pointer<float>(weight, "weight", count),
        .residual = pointer<int16_t>(residual, "residual", 0),
        .exp_avg = moment_pointer(exp_avg, "exp_avg", kind, count),
        .exp_avg_sq = moment_pointer(exp_avg_sq, "exp_avg_sq", kind, count),
        .exp_avg_scale = scaled ? pointer<float>(exp_avg_scale, "exp_avg_scale", count) : nullptr,
        .exp_avg_sq_scale = scaled ? pointer<float>(exp_avg_sq_scale, "exp_avg_sq_scale", count) : nullptr,
        .first = first,
        .key = rounding_key(seed, step),
    };
    const KernelTable::AdamW kernel = kernels_for(isa).adamw[static_cast<size_t>(kind)][split][bfloat16];
    const AdamWScalars scalars = adamw_scalars(lr, beta1, beta2, eps, weight_decay, step, grad_scale);
    pool.parallel_for(count, kBlock, [&](size_t begin, size_t end) { kernel(scalars, chunk, begin, end); });
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

// The words of a range that is compressed or shall be.
uint8_t* words_pointer(uintptr_t address, size_t num_words, size_t word_bytes) {
    if (word_bytes != 2 && word_bytes != 4) {
        throw std::invalid_argument("word_bytes is " + std::to_string(word_bytes) + ": words have 2 or 4 bytes");
    }
    if (num_words % kCompressGroup != 0) {
        throw std::invalid_argument("num_words is " + std::to_string(num_words) +
                                    ": words are compressed in groups of " + std::to_string(kCompressGroup) +
                                    ", give a multiple of that");
    }
    if (word_bytes == 2) return reinterpret_cast<uint8_t*>(pointer<uint16_t>(address, "the range", num_words));
    return reinterpret_cast<uint8_t*>(pointer<uint32_t>(address, "the range", num_words));
}

size_t compress_range(ThreadPool& pool, uintptr_t address, size_t num_words, size_t word_bytes,
                      const std::string& isa) {
    uint8_t* range = words_pointer(address, num_words, word_bytes);
    return compress(pool, kernels_for(isa).compression[word_bytes == 2], range, num_words, word_bytes);
}

void decompress_range(ThreadPool& pool, uintptr_t address, size_t num_bytes, size_t num_words, size_t word_bytes,
                      const std::string& isa) {
    uint8_t* range = words_pointer(address, num_words, word_bytes);
    decompress(pool, kernels_for(isa).compression[word_bytes == 2], range, num_bytes, num_words, word_bytes);
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
    m.def("adamw", &adamw, "pool"_a, "isa"_a, "moments"_a, "grad"_a, "grad_dtype"_a, "weight"_a, "residual"_a,
          "exp_avg"_a, "exp_avg_sq"_a, "exp_avg_scale"_a, "exp_avg_sq_scale"_a, "count"_a, "first"_a, "seed"_a, "lr"_a,
          "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "step"_a, "grad_scale"_a, release());
    m.def("split", &split, "pool"_a, "fp32"_a, "weight"_a, "residual"_a, "count"_a, "isa"_a = "auto", release());
    m.def("join", &join, "pool"_a, "weight"_a, "residual"_a, "fp32"_a, "count"_a, "isa"_a = "auto", release());
    m.def("to_bfloat16", &to_bfloat16, "pool"_a, "fp32"_a, "bf16"_a, "count"_a, "isa"_a = "auto", release());
    m.def("from_bfloat16", &from_bfloat16, "pool"_a, "bf16"_a, "fp32"_a, "count"_a, "isa"_a = "auto", release());
    m.def("add_fp32", &add_fp32, "pool"_a, "dst"_a, "src"_a, "count"_a, "isa"_a = "auto", release());
    m.def("sum_of_squares", &sum_of_squares, "pool"_a, "values"_a, "dtype"_a, "count"_a, "partials"_a,
          "granule"_a = 2048, "isa"_a = "auto", release());
    m.def("compress", &compress_range, "pool"_a, "address"_a, "num_words"_a, "word_bytes"_a, "isa"_a = "auto",
          release());
    m.def("decompress", &decompress_range, "pool"_a, "address"_a, "num_bytes"_a, "num_words"_a, "word_bytes"_a,
          "isa"_a = "auto", release());

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
