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
    const __m256i compressed = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
    _mm_storeu_si128(static_cast<__m128i*>(to_first), _mm256_castsi256_si128(compressed));
    _mm_storeu_si128(static_cast<__m128i*>(to_second), _mm256_extracti128_si256(compressed, 1));
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
    const __m256i compressed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(compressed));
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

inline __m256i load_all(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store_all(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }

// A vector of a group, as it is compressed.
template <bool rotated>
inline __m256i compressed_form(const uint32_t* from) {
    const __m256i x = load_all(from);
    return rotated ? _mm256_or_si256(_mm256_slli_epi32(x, 1), _mm256_srli_epi32(x, 31)) : x;
}

template <bool rotated>
inline __m256i compressed_form(const uint16_t* from) {
    const __m256i x = load_all(from);
    return rotated ? _mm256_or_si256(_mm256_slli_epi16(x, 1), _mm256_srli_epi16(x, 15)) : x;
}

template <bool rotated>
inline void store_restored(uint32_t* to, __m256i x) {
    store_all(to, rotated ? _mm256_or_si256(_mm256_srli_epi32(x, 1), _mm256_slli_epi32(x, 31)) : x);
}

template <bool rotated>
inline void store_restored(uint16_t* to, __m256i x) {
    store_all(to, rotated ? _mm256_or_si256(_mm256_srli_epi16(x, 1), _mm256_slli_epi16(x, 15)) : x);
}

// Of words 0 to 31 and 32 to 63.
struct TopBytes {
    __m256i half[2];
};

template <bool rotated>
inline __m256i top_of_lanes(const uint32_t* from) {
    return _mm256_srli_epi32(compressed_form<rotated>(from), 24);
}

template <bool rotated>
inline TopBytes top_bytes(const uint32_t* group) {
    // Both compressions work within 128 bits: four bytes of each of four vectors come to lie side by side.
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    TopBytes tops;
    for (size_t i = 0; i < 2; ++i, group += 32) {
        const __m256i first = _mm256_packus_epi32(top_of_lanes<rotated>(group), top_of_lanes<rotated>(group + 8));
        const __m256i last = _mm256_packus_epi32(top_of_lanes<rotated>(group + 16), top_of_lanes<rotated>(group + 24));
        tops.half[i] = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, last), in_order);
    }
    return tops;
}

template <bool rotated>
inline TopBytes top_bytes(const uint16_t* group) {
    TopBytes tops;
    for (size_t i = 0; i < 2; ++i, group += 32) {
        const __m256i first = _mm256_srli_epi16(compressed_form<rotated>(group), 8);
        const __m256i last = _mm256_srli_epi16(compressed_form<rotated>(group + 16), 8);
        tops.half[i] = _mm256_permute4x64_epi64(_mm256_packus_epi16(first, last), 0xd8);
    }
    return tops;
}

inline uint32_t smallest_byte(__m128i x) {
    const __m128i words = _mm_min_epu8(x, _mm_srli_epi16(x, 8));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(words))) & 0xff;
}

inline GroupExtent extent(const TopBytes& tops) {
    const __m256i smaller = _mm256_min_epu8(tops.half[0], tops.half[1]);
    const __m256i larger = _mm256_max_epu8(tops.half[0], tops.half[1]);
    const __m128i smallest = _mm_min_epu8(_mm256_castsi256_si128(smaller), _mm256_extracti128_si256(smaller, 1));
    const __m128i largest = _mm_max_epu8(_mm256_castsi256_si128(larger), _mm256_extracti128_si256(larger, 1));
    return {smallest_byte(smallest), 255 - smallest_byte(_mm_xor_si128(largest, _mm_set1_epi8(-1)))};
}

inline void store_planes(const TopBytes& tops, uint8_t base, uint8_t* to) {
    const __m256i bases = _mm256_set1_epi8(static_cast<char>(base));
    __m256i first = _mm256_sub_epi8(tops.half[0], bases);
    __m256i last = _mm256_sub_epi8(tops.half[1], bases);
    for (size_t plane = 8; plane-- > 0;) {
        const uint32_t bits[2] = {static_cast<uint32_t>(_mm256_movemask_epi8(first)),
                                  static_cast<uint32_t>(_mm256_movemask_epi8(last))};
        __builtin_memcpy(to + 8 * plane, bits, 8);
        first = _mm256_add_epi8(first, first);
        last = _mm256_add_epi8(last, last);
    }
}

// All bits of byte i are bit i.
inline __m256i spread(const uint8_t* from) {
    int bits;
    __builtin_memcpy(&bits, from, 4);
    const __m256i bytes = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i own_bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i found = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), bytes), own_bit);
    return _mm256_cmpeq_epi8(found, own_bit);
}

inline TopBytes load_planes(const uint8_t* from, GroupHeader header) {
    const __m256i wanted = _mm256_set1_epi8(static_cast<char>((1 << header.width) - 1));
    const __m256i bases = _mm256_set1_epi8(static_cast<char>(header.base));
    TopBytes tops;
    for (size_t i = 0; i < 2; ++i, from += 4) {
        __m256i x = _mm256_setzero_si256();
        for (size_t plane = 8; plane-- > 0;) {
            x = _mm256_sub_epi8(_mm256_add_epi8(x, x), spread(from + 8 * plane));
        }
        tops.half[i] = _mm256_add_epi8(_mm256_and_si256(x, wanted), bases);
    }
    return tops;
}

template <bool rotated>
inline void store_low(const uint32_t* group, uint8_t* to) {
    const __m256i low_bytes = _mm256_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1, 0, 1, 2, 4, 5, 6,
                                               8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    const __m256i together = _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 3, 7);
    for (size_t i = 0; i < kCompressGroup; i += 8, to += 24) {
        const __m256i bytes = _mm256_shuffle_epi8(compressed_form<rotated>(group + i), low_bytes);
        const __m256i compressed = _mm256_permutevar8x32_epi32(bytes, together);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(compressed));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 16), _mm256_extracti128_si256(compressed, 1));
    }
}

template <bool rotated>
inline void store_low(const uint16_t* group, uint8_t* to) {
    const __m256i low = _mm256_set1_epi16(0xff);
    for (size_t i = 0; i < kCompressGroup; i += 32) {
        const __m256i first = _mm256_and_si256(compressed_form<rotated>(group + i), low);
        const __m256i last = _mm256_and_si256(compressed_form<rotated>(group + i + 16), low);
        store_all(to + i, _mm256_permute4x64_epi64(_mm256_packus_epi16(first, last), 0xd8));
    }
}

template <bool rotated>
inline void join_words(const TopBytes& tops, const uint8_t* low, uint32_t* group) {
    const __m256i apart = _mm256_setr_epi32(0, 1, 2, 6, 3, 4, 5, 7);
    const __m256i low_bytes = _mm256_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1, 0, 1, 2, -1, 3, 4,
                                               5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    // The inverse of top_bytes: four bytes for each of four vectors, side by side in 128 bits.
    const __m256i side_by_side = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    for (size_t i = 0; i < 2; ++i) {
        const __m256i top = _mm256_permutevar8x32_epi32(tops.half[i], side_by_side);
        __m256i top_byte = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1, 3, -1, -1, -1, 0,
                                            -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1, 3);
        for (size_t k = 0; k < 4; ++k, low += 24, group += 8) {
            const __m256i bytes = _mm256_permutevar8x32_epi32(load_all(low), apart);
            const __m256i x =
                _mm256_or_si256(_mm256_shuffle_epi8(bytes, low_bytes), _mm256_shuffle_epi8(top, top_byte));
            store_restored<rotated>(group, x);
            top_byte = _mm256_add_epi8(top_byte, _mm256_set1_epi32(0x04000000));
        }
    }
}

template <bool rotated>
inline void join_words(const TopBytes& tops, const uint8_t* low, uint16_t* group) {
    for (size_t i = 0; i < 2; ++i, low += 32, group += 32) {
        const __m256i top = _mm256_permute4x64_epi64(tops.half[i], 0xd8);
        const __m256i bytes = _mm256_permute4x64_epi64(load_all(low), 0xd8);
        store_restored<rotated>(group, _mm256_unpacklo_epi8(bytes, top));
        store_restored<rotated>(group + 16, _mm256_unpackhi_epi8(bytes, top));
    }
}

#include "kernels_body.inc"

}  // namespace

constinit const KernelTable kAvx2Kernels = kTable;

}  // namespace greedysnake
#endif
