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

#include "kernels_compress.h"
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

// How both moments are stored: as they are; as the upper halves of fp32, rounded by chance; or as one-byte codes
// with an fp32 scale per group. Whatever the kind, a step decodes them, blends them with the gradient and moves the
// weight in fp32, and rounds them last.
enum class MomentKind { kFloat32, kBfloat16, kInt8 };
constexpr size_t kNumMomentKinds = 3;

// Consecutive parameters that share the scales of int8 moments.
constexpr size_t kMomentGroup = 64;

// A code stands for a part, from 0 to 1, of its group's largest magnitude. It is the upper bits of that part as an
// fp32, `mantissa_bits` of the mantissa included, less an offset that makes the largest code 1.0: the codes of a
// binade are evenly spaced, and with 3 bits of mantissa 128 codes reach down 16 binades, 256 codes 32.
template <uint32_t magnitude_bits, uint32_t mantissa_bits>
struct MomentCode {
    static constexpr uint32_t kTop = (1u << magnitude_bits) - 1;
    static constexpr uint32_t kOffset = (127u << mantissa_bits) - kTop;
    static constexpr uint32_t kShift = 23 - mantissa_bits;
};
// Both are rounded by chance. To nearest, a moment would stay as it is for good where a step changes it by less than
// half a place, as a beta of 0.95 does: exp_avg_sq would never come down, or exp_avg stay while exp_avg_sq does come
// down. A byte of exp_avg is this and the sign above it; code 0 is zero.
using ExpAvgCode = MomentCode<7, 3>;
// A byte of exp_avg_sq is this. No code is zero, on purpose: code 0 is 1.125 * 2^-32 of the group's largest, so a tiny
// exp_avg_sq is rounded up, and exp_avg over the root stays bounded.
using ExpAvgSqCode = MomentCode<8, 3>;

// Spreads 32 bits over 32 bits, one to one: Chris Wellons' lowbias32. Static, because a function shared between
// files compiled for different instruction sets would be linked once, for either.
template <class T>
static inline T lowbias32(T x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return x;
}

// What the random bits of one step of one block start from.
uint32_t rounding_key(uint32_t seed, int64_t step);

// `residual` is null when `weight` is fp32.
struct AdamWChunk {
    const void* grad;
    void* weight;
    int16_t* residual;
    void* exp_avg;  // float, bf16 or uint8_t
    void* exp_avg_sq;
    float* exp_avg_scale;  // of int8 moments: one per kMomentGroup
    float* exp_avg_sq_scale;
    // Of moments rounded by chance: the random bits of element i depend on `first` + i and `key` alone, so neither
    // threads nor cuts of the range change them.
    uint64_t first;
    uint32_t key;
};

// One instruction set's kernels; each works on the elements (or granules) in [begin, end). With int8 moments both are
// multiples of kMomentGroup.
struct KernelTable {
    using AdamW = void (*)(const AdamWScalars&, const AdamWChunk&, size_t begin, size_t end);
    using SumOfSquares = void (*)(const void* values, size_t count, double* partials, size_t granule, size_t begin,
                                  size_t end);

    AdamW adamw[kNumMomentKinds][2][2];  // indexed by kind, "the weight is split", "the gradient is bf16"
    SumOfSquares sum_of_squares[2];      // indexed by "the values are bf16"
    void (*split)(const float*, bf16*, int16_t*, size_t begin, size_t end);
    void (*join)(const bf16*, const int16_t*, float*, size_t begin, size_t end);
    void (*to_bfloat16)(const float*, bf16*, size_t begin, size_t end);
    void (*from_bfloat16)(const bf16*, float*, size_t begin, size_t end);
    void (*add_fp32)(float*, const float*, size_t begin, size_t end);
    CompressionKernels compression[2];  // indexed by "words have 2 bytes"
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
