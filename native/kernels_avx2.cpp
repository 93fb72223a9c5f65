// The kernels eight elements at a time.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

namespace greedysnake {
namespace {

using Vector = __m256;
using Bits = uint32_t __attribute__((vector_size(32)));
constexpr size_t kWidth = 8;

inline Vector load(const float* from) { return _mm256_loadu_ps(from); }

inline __m256i load_widened(const void* from) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}

inline Vector load(const bf16* from) { return _mm256_castsi256_ps(_mm256_slli_epi32(load_widened(from), 16)); }
inline void store(float* to, Vector x) { _mm256_storeu_ps(to, x); }
inline Vector broadcast(float x) { return _mm256_set1_ps(x); }
inline Vector square_root(Vector x) { return _mm256_sqrt_ps(x); }
// minps returns its second operand when either is NaN, so a NaN x stays.
inline Vector at_most(Vector x, Vector limit) { return _mm256_min_ps(limit, x); }

inline Vector without_payload(Vector x) {
    const Vector nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

inline Vector join_bits(const bf16* weight, const int16_t* residual) {
    const __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(residual)));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(load_widened(weight), 16), low));
}

inline Bits bits_of(Vector x) { return (Bits)x; }
inline Vector from_bits(Bits x) { return (Vector)x; }
inline Bits smaller(Bits x, Bits y) { return (Bits)_mm256_min_epu32((__m256i)x, (__m256i)y); }
inline Bits larger(Bits x, Bits y) { return (Bits)_mm256_max_epu32((__m256i)x, (__m256i)y); }
inline Bits if_nonzero(Bits test, Bits x) { return x & (Bits)(test != 0); }

inline Bits if_below(Bits test, uint32_t limit, Bits x) {
    return x & (Bits)_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(limit)), (__m256i)test);
}

inline Bits lane_numbers() { return Bits{0, 1, 2, 3, 4, 5, 6, 7}; }

inline uint32_t largest_lane(Bits x) {
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(half));
}

inline Bits load_bytes(const uint8_t* from) {
    return (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

inline __m128i narrowed(Bits x) {
    return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
}

inline void store_bytes(uint8_t* to, Bits x) {
    const __m128i words = narrowed(x);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
}

inline void store_words(bf16* to, Bits x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrowed(x)); }

// Two vectors of 16-bit values in 32-bit lanes, stored as 16 bits.
inline void store_narrowed(__m256i first, void* to_first, __m256i second, void* to_second) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
    _mm_storeu_si128(static_cast<__m128i*>(to_first), _mm256_castsi256_si128(packed));
    _mm_storeu_si128(static_cast<__m128i*>(to_second), _mm256_extracti128_si256(packed, 1));
}

inline void split_bits(Vector x, bf16* weight, int16_t* residual) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
    store_narrowed(high, weight, _mm256_and_si256(bits, _mm256_set1_epi32(0xffff)), residual);
}

inline void store_rounded(bf16* to, Vector x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

struct Squares {
    __m256d sums[4] = {};

    template <class T>
    void add(const T* values) {
        for (size_t j = 0; j < 2; ++j) {
            const Vector x = load(values + 8 * j);
            const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
            const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
            sums[2 * j] += low * low;
            sums[2 * j + 1] += high * high;
        }
    }
    void store(double* to) const {
        for (size_t j = 0; j < 4; ++j) _mm256_storeu_pd(to + 4 * j, sums[j]);
    }
};

#include "kernels_body.inc"

}  // namespace

constinit const KernelTable kAvx2Kernels = kTable;

}  // namespace greedysnake
#endif
