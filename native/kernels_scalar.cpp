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

#include "kernels_body.inc"

}  // namespace

constinit const KernelTable kScalarKernels = kTable;

}  // namespace greedysnake
