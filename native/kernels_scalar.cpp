// The kernels one element at a time, in plain C++: the twin that the vector versions are compared with.
#include <bit>
#include <cmath>

#include "kernels.h"

namespace greedysnake {
namespace {

using Vector = float;
using Bits = uint32_t;
constexpr size_t kWidth = 1;

inline Vector load(const float* from) { return *from; }
inline Vector load(const bf16* from) { return std::bit_cast<float>(static_cast<uint32_t>(*from) << 16); }
inline void store(float* to, Vector x) { *to = x; }
inline Vector broadcast(float x) { return x; }
inline Vector square_root(Vector x) { return std::sqrt(x); }
inline Vector at_most(Vector x, Vector limit) { return limit < x ? limit : x; }
inline Vector without_payload(Vector x) { return x == x ? x : std::bit_cast<float>(0x7fc00000u); }

inline Bits bits_of(Vector x) { return std::bit_cast<Bits>(x); }
inline Vector from_bits(Bits x) { return std::bit_cast<Vector>(x); }
inline Bits smaller(Bits x, Bits y) { return y < x ? y : x; }
inline Bits larger(Bits x, Bits y) { return x < y ? y : x; }
inline Bits if_nonzero(Bits test, Bits x) { return test != 0 ? x : 0; }
inline Bits if_below(Bits test, uint32_t limit, Bits x) { return test < limit ? x : 0; }
inline Bits lane_numbers() { return 0; }
inline uint32_t largest_lane(Bits x) { return x; }
inline Bits load_bytes(const uint8_t* from) { return *from; }
inline void store_bytes(uint8_t* to, Bits x) { *to = static_cast<uint8_t>(x); }
inline void store_words(bf16* to, Bits x) { *to = static_cast<bf16>(x); }

inline Vector join_bits(const bf16* weight, const int16_t* residual) {
    return std::bit_cast<float>((static_cast<uint32_t>(*weight) << 16) +
                                static_cast<uint32_t>(static_cast<int32_t>(*residual)));
}

inline void split_bits(Vector x, bf16* weight, int16_t* residual) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    *weight = static_cast<bf16>((bits + 0x8000u) >> 16);
    *residual = static_cast<int16_t>(bits);
}

inline void store_rounded(bf16* to, Vector x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    *to = static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

struct Squares {
    double sums[16] = {};

    template <class T>
    void add(const T* values) {
        for (size_t j = 0; j < 16; ++j) {
            const double x = load(values + j);
            sums[j] += x * x;
        }
    }
    void store(double* to) const {
        for (size_t j = 0; j < 16; ++j) to[j] = sums[j];
    }
};

struct TopBytes {
    uint8_t at[kCompressGroup];
};

template <bool rotated, class Word>
inline Word compressed_form(Word word) {
    return static_cast<Word>(rotated ? word << 1 | word >> (8 * sizeof(Word) - 1) : word);
}

template <bool rotated, class Word>
inline TopBytes top_bytes(const Word* group) {
    TopBytes tops;
    for (size_t i = 0; i < kCompressGroup; ++i) {
        tops.at[i] = static_cast<uint8_t>(compressed_form<rotated>(group[i]) >> (8 * sizeof(Word) - 8));
    }
    return tops;
}

inline GroupExtent extent(const TopBytes& tops) {
    uint8_t smallest = 255, largest = 0;
    for (const uint8_t top : tops.at) {
        smallest = top < smallest ? top : smallest;
        largest = top > largest ? top : largest;
    }
    return {smallest, largest};
}

// Bit c of byte r becomes bit r of byte c: Hacker's Delight, section 7-3.
inline uint64_t transposed(uint64_t bits) {
    uint64_t changes = (bits ^ bits >> 7) & 0x00aa00aa00aa00aa;
    bits ^= changes ^ changes << 7;
    changes = (bits ^ bits >> 14) & 0x0000cccc0000cccc;
    bits ^= changes ^ changes << 14;
    changes = (bits ^ bits >> 28) & 0x00000000f0f0f0f0;
    return bits ^ changes ^ changes << 28;
}

inline void store_planes(const TopBytes& tops, uint8_t base, uint8_t* to) {
    for (size_t i = 0; i < 8; ++i) {
        uint64_t bits = 0;
        for (size_t k = 0; k < 8; ++k) {
            bits |= static_cast<uint64_t>(static_cast<uint8_t>(tops.at[8 * i + k] - base)) << (8 * k);
        }
        bits = transposed(bits);
        for (size_t plane = 0; plane < 8; ++plane) to[8 * plane + i] = static_cast<uint8_t>(bits >> (8 * plane));
    }
}

inline TopBytes load_planes(const uint8_t* from, GroupHeader header) {
    TopBytes tops;
    for (size_t i = 0; i < 8; ++i) {
        uint64_t bits = 0;
        for (size_t plane = 0; plane < header.width; ++plane) {
            bits |= static_cast<uint64_t>(from[8 * plane + i]) << (8 * plane);
        }
        bits = transposed(bits);
        for (size_t k = 0; k < 8; ++k) tops.at[8 * i + k] = static_cast<uint8_t>((bits >> (8 * k)) + header.base);
    }
    return tops;
}

template <bool rotated, class Word>
inline void store_low(const Word* group, uint8_t* to) {
    constexpr size_t kLow = sizeof(Word) - 1;
    for (size_t i = 0; i < kCompressGroup; ++i) {
        const Word word = compressed_form<rotated>(group[i]);
        for (size_t k = 0; k < kLow; ++k) to[kLow * i + k] = static_cast<uint8_t>(word >> (8 * k));
    }
}

template <bool rotated, class Word>
inline void join_words(const TopBytes& tops, const uint8_t* low, Word* group) {
    constexpr size_t kLow = sizeof(Word) - 1;
    for (size_t i = 0; i < kCompressGroup; ++i) {
        uint32_t word = static_cast<uint32_t>(tops.at[i]) << (8 * kLow);
        for (size_t k = 0; k < kLow; ++k) word |= static_cast<uint32_t>(low[kLow * i + k]) << (8 * k);
        group[i] = static_cast<Word>(rotated ? word >> 1 | word << (8 * sizeof(Word) - 1) : word);
    }
}

#include "kernels_body.inc"

}  // namespace

constinit const KernelTable kScalarKernels = kTable;

}  // namespace greedysnake
