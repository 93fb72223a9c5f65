// The kernels sixteen elements at a time.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 sees an uninitialized variable in its own header (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "kernels.h"

namespace greedysnake {
namespace {

using Vector = __m512;
using Bits = uint32_t __attribute__((vector_size(64)));
constexpr size_t kWidth = 16;

inline Vector load(const float* from) { return _mm512_loadu_ps(from); }

inline __m512i load_widened(const void* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}

inline Vector load(const bf16* from) { return _mm512_castsi512_ps(_mm512_slli_epi32(load_widened(from), 16)); }
inline void store(float* to, Vector x) { _mm512_storeu_ps(to, x); }
inline Vector broadcast(float x) { return _mm512_set1_ps(x); }
inline Vector square_root(Vector x) { return _mm512_sqrt_ps(x); }
// minps returns its second operand when either is NaN, so a NaN x stays.
inline Vector at_most(Vector x, Vector limit) { return _mm512_min_ps(limit, x); }

inline Vector without_payload(Vector x) {
    const Vector nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
}

inline Bits bits_of(Vector x) { return (Bits)x; }
inline Vector from_bits(Bits x) { return (Vector)x; }
inline Bits smaller(Bits x, Bits y) { return (Bits)_mm512_min_epu32((__m512i)x, (__m512i)y); }
inline Bits larger(Bits x, Bits y) { return (Bits)_mm512_max_epu32((__m512i)x, (__m512i)y); }

inline Bits if_nonzero(Bits test, Bits x) {
    return (Bits)_mm512_maskz_mov_epi32(_mm512_test_epi32_mask((__m512i)test, (__m512i)test), (__m512i)x);
}

inline Bits if_below(Bits test, uint32_t limit, Bits x) {
    const __mmask16 below = _mm512_cmplt_epu32_mask((__m512i)test, _mm512_set1_epi32(static_cast<int>(limit)));
    return (Bits)_mm512_maskz_mov_epi32(below, (__m512i)x);
}

inline Bits lane_numbers() { return Bits{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
inline uint32_t largest_lane(Bits x) { return _mm512_reduce_max_epu32((__m512i)x); }

inline Bits load_bytes(const uint8_t* from) {
    return (Bits)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline void store_bytes(uint8_t* to, Bits x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)x));
}

inline Vector join_bits(const bf16* weight, const int16_t* residual) {
    const __m512i low = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(residual)));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(load_widened(weight), 16), low));
}

inline void store_narrowed(void* to, __m512i x) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x));
}

inline void store_words(bf16* to, Bits x) { store_narrowed(to, (__m512i)x); }

inline void split_bits(Vector x, bf16* weight, int16_t* residual) {
    const __m512i bits = _mm512_castps_si512(x);
    store_narrowed(weight, _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16));
    store_narrowed(residual, bits);
}

inline void store_rounded(bf16* to, Vector x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    store_narrowed(to, _mm512_srli_epi32(rounded, 16));
}

struct Squares {
    __m512d sums[2] = {};

    template <class T>
    void add(const T* values) {
        const Vector x = load(values);
        const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
        const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
        sums[0] += low * low;
        sums[1] += high * high;
    }
    void store(double* to) const {
        for (size_t j = 0; j < 2; ++j) _mm512_storeu_pd(to + 8 * j, sums[j]);
    }
};

#include "kernels_body.inc"

}  // namespace

constinit const KernelTable kAvx512Kernels = kTable;

}  // namespace greedysnake
#endif
