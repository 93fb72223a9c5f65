// Optimizer kernels: fused AdamW, bf16 split and join, sums of squares, CRC32C.
// They know addresses and counts; nothing of Python, torch or files.
//
// Every instruction set gives the same bits, NaNs included: only correctly rounded operations, no contraction
// to FMA, one order of summation, one NaN (0x7fc00000).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels_pool.h"

namespace greedysnake {

using bf16 = uint16_t;

// The scalars of one AdamW step, computed in double and rounded once.
struct AdamWScalars {
    float grad_scale;
    // A moment becomes base + rate * (other - base). The base is the moment, or for beta < 0.5 the new value,
    // so that the difference is always shrunk: rounding then stays relative to the result, and beta = 0 is
    // exact.
    float rate1, rate2;
    bool base1_is_new, base2_is_new;
    // lr * sqrt(bias_correction2) / bias_correction1 and eps * sqrt(bias_correction2): multiplying both sides
    // of the fraction by sqrt(bias_correction2) saves an operation and a rounding per element.
    float step_size;
    float eps;
    float decay;  // lr * weight_decay
};

AdamWScalars adamw_scalars(double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step,
                           double grad_scale);

// `residual` is null when `weight` is fp32.
struct AdamWChunk {
    const void* grad;
    void* weight;
    int16_t* residual;
    float* exp_avg;
    float* exp_avg_sq;
};

// One instruction set's kernels; each works on the elements (or granules) in [begin, end).
struct KernelTable {
    using AdamW = void (*)(const AdamWScalars&, const AdamWChunk&, size_t begin, size_t end);
    using SumOfSquares = void (*)(const void* values, size_t count, double* partials, size_t granule, size_t begin,
                                  size_t end);

    AdamW adamw_split[2];  // indexed by "the gradient is bf16"
    AdamW adamw_fp32[2];
    SumOfSquares sum_of_squares[2];  // indexed by "the values are bf16"
    void (*split)(const float*, bf16*, int16_t*, size_t begin, size_t end);
    void (*join)(const bf16*, const int16_t*, float*, size_t begin, size_t end);
    void (*to_bfloat16)(const float*, bf16*, size_t begin, size_t end);
    void (*from_bfloat16)(const bf16*, float*, size_t begin, size_t end);
    void (*add_fp32)(float*, const float*, size_t begin, size_t end);
};

extern const KernelTable kScalarKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

// The instruction sets this CPU and build can use, narrowest first.
std::vector<std::string> available_isas();
// "auto" is the widest available; an unknown or unavailable name throws std::invalid_argument.
const KernelTable& kernels_for(std::string_view isa);

uint32_t crc32c(const void* data, size_t nbytes, uint32_t seed);
// The same without special instructions: the only way elsewhere than x86, and the twin for tests.
uint32_t crc32c_portable(const void* data, size_t nbytes, uint32_t seed);
// The CRC of A followed by B, from crc(A), crc(B) and B's length.
uint32_t crc32c_combine(uint32_t crc1, uint32_t crc2, uint64_t nbytes2);

// Reads every cache line of [data, data + nbytes) and rewrites three of each four: the mix of an AdamW step
// with fp32 gradients (16 B read, 12 B written) without its arithmetic. Leaves the contents scrambled.
void memory_pass(ThreadPool& pool, void* data, size_t nbytes);

}  // namespace greedysnake
