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

// A vector of a group, as it is compressed.
template <bool rotated>
inline __m512i compressed_form(const uint32_t* from) {
    return _mm512_rol_epi32(_mm512_loadu_si512(from), rotated ? 1 : 0);
}

template <bool rotated>
inline __m512i compressed_form(const uint16_t* from) {
    const __m512i x = _mm512_loadu_si512(from);
    return rotated ? _mm512_or_si512(_mm512_slli_epi16(x, 1), _mm512_srli_epi16(x, 15)) : x;
}

template <bool rotated>
inline void store_restored(uint32_t* to, __m512i x) {
    _mm512_storeu_si512(to, _mm512_ror_epi32(x, rotated ? 1 : 0));
}

template <bool rotated>
inline void store_restored(uint16_t* to, __m512i x) {
    _mm512_storeu_si512(to, rotated ? _mm512_or_si512(_mm512_srli_epi16(x, 1), _mm512_slli_epi16(x, 15)) : x);
}

using TopBytes = __m512i;

template <bool rotated>
inline __m512i top_of_lanes(const uint32_t* from) {
    return _mm512_srli_epi32(compressed_form<rotated>(from), 24);
}

// Compression works within 128 bits: four bytes of each of four vectors come to lie side by side. This puts them in
// order, and such as are in order side by side.
inline __m512i with_quarters_exchanged(__m512i x) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
}

// The same for eight bytes of each of two vectors.
inline __m512i in_order(__m512i x) { return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x); }

inline __m512i side_by_side(__m512i x) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x);
}

template <bool rotated>
inline TopBytes top_bytes(const uint32_t* group) {
    const __m512i first = _mm512_packus_epi32(top_of_lanes<rotated>(group), top_of_lanes<rotated>(group + 16));
    const __m512i last = _mm512_packus_epi32(top_of_lanes<rotated>(group + 32), top_of_lanes<rotated>(group + 48));
    return with_quarters_exchanged(_mm512_packus_epi16(first, last));
}

template <bool rotated>
inline TopBytes top_bytes(const uint16_t* group) {
    const __m512i first = _mm512_srli_epi16(compressed_form<rotated>(group), 8);
    const __m512i last = _mm512_srli_epi16(compressed_form<rotated>(group + 32), 8);
    return in_order(_mm512_packus_epi16(first, last));
}

inline uint32_t smallest_byte(__m128i x) {
    const __m128i words = _mm_min_epu8(x, _mm_srli_epi16(x, 8));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(words))) & 0xff;
}

inline GroupExtent extent(TopBytes tops) {
    const __m256i first = _mm512_castsi512_si256(tops), last = _mm512_extracti64x4_epi64(tops, 1);
    const __m256i smaller = _mm256_min_epu8(first, last);
    const __m256i larger = _mm256_max_epu8(first, last);
    const __m128i smallest = _mm_min_epu8(_mm256_castsi256_si128(smaller), _mm256_extracti128_si256(smaller, 1));
    const __m128i largest = _mm_max_epu8(_mm256_castsi256_si128(larger), _mm256_extracti128_si256(larger, 1));
    return {smallest_byte(smallest), 255 - smallest_byte(_mm_xor_si128(largest, _mm_set1_epi8(-1)))};
}

inline void store_planes(TopBytes tops, uint8_t base, uint8_t* to) {
    const __m512i x = _mm512_sub_epi8(tops, _mm512_set1_epi8(static_cast<char>(base)));
    for (size_t plane = 0; plane < 8; ++plane) {
        const uint64_t bits = _mm512_test_epi8_mask(x, _mm512_set1_epi8(static_cast<char>(1 << plane)));
        __builtin_memcpy(to + 8 * plane, &bits, 8);
    }
}

inline TopBytes load_planes(const uint8_t* from, GroupHeader header) {
    __m512i x = _mm512_setzero_si512();
    for (size_t plane = 0; plane < 8; ++plane) {
        uint64_t bits;
        __builtin_memcpy(&bits, from + 8 * plane, 8);
        x = _mm512_mask_add_epi8(x, bits, x, _mm512_set1_epi8(static_cast<char>(1 << plane)));
    }
    const __m512i wanted = _mm512_set1_epi8(static_cast<char>((1 << header.width) - 1));
    return _mm512_add_epi8(_mm512_and_si512(x, wanted), _mm512_set1_epi8(static_cast<char>(header.base)));
}

template <bool rotated>
inline void store_low(const uint32_t* group, uint8_t* to) {
    const __m512i low_bytes =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    const __m512i together = _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 3, 7, 11, 15);
    for (size_t i = 0; i < kCompressGroup; i += 16, to += 48) {
        const __m512i bytes = _mm512_shuffle_epi8(compressed_form<rotated>(group + i), low_bytes);
        const __m512i compressed = _mm512_permutexvar_epi32(together, bytes);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(compressed));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 32), _mm512_extracti32x4_epi32(compressed, 2));
    }
}

template <bool rotated>
inline void store_low(const uint16_t* group, uint8_t* to) {
    const __m512i low = _mm512_set1_epi16(0xff);
    const __m512i first = _mm512_and_si512(compressed_form<rotated>(group), low);
    const __m512i last = _mm512_and_si512(compressed_form<rotated>(group + 32), low);
    _mm512_storeu_si512(to, in_order(_mm512_packus_epi16(first, last)));
}

template <bool rotated>
inline void join_words(TopBytes tops, const uint8_t* low, uint32_t* group) {
    const __m512i apart = _mm512_setr_epi32(0, 1, 2, 12, 3, 4, 5, 13, 6, 7, 8, 14, 9, 10, 11, 15);
    const __m512i low_bytes =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1));
    __m512i top_byte =
        _mm512_broadcast_i32x4(_mm_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1, 3));
    const __m512i top = with_quarters_exchanged(tops);
    for (size_t i = 0; i < 4; ++i, low += 48, group += 16) {
        const __m512i bytes = _mm512_permutexvar_epi32(apart, _mm512_loadu_si512(low));
        const __m512i x = _mm512_or_si512(_mm512_shuffle_epi8(bytes, low_bytes), _mm512_shuffle_epi8(top, top_byte));
        store_restored<rotated>(group, x);
        top_byte = _mm512_add_epi8(top_byte, _mm512_set1_epi32(0x04000000));
    }
}

template <bool rotated>
inline void join_words(TopBytes tops, const uint8_t* low, uint16_t* group) {
    const __m512i top = side_by_side(tops);
    const __m512i bytes = side_by_side(_mm512_loadu_si512(low));
    store_restored<rotated>(group, _mm512_unpacklo_epi8(bytes, top));
    store_restored<rotated>(group + 32, _mm512_unpackhi_epi8(bytes, top));
}

#include "kernels_body.inc"

}  // namespace

constinit const KernelTable kAvx512Kernels = kTable;

}  // namespace greedysnake
#endif
