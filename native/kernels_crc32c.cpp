// CRC32C (Castagnoli, reflected): the SSE4.2 instruction over three streams at once, or tables elsewhere.
#include <array>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace greedysnake {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;

// Product of two polynomials modulo the CRC's; bit 31 is the coefficient of x^0.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
    }
    return product;
}

// x^(8 * nbytes): multiplying a CRC by it is the effect of nbytes zero bytes.
constexpr uint32_t shift_factor(uint64_t nbytes) {
    uint32_t factor = 1u << 31;
    uint32_t power = 1u << 23;
    for (; nbytes != 0; nbytes >>= 1) {
        if (nbytes & 1) factor = multiply(factor, power);
        power = multiply(power, power);
    }
    return factor;
}

using Table = std::array<std::array<uint32_t, 256>, 4>;

// Multiplication by shift_factor(nbytes), one lookup per byte of the CRC.
[[maybe_unused]] constexpr Table shift_table(uint64_t nbytes) {
    Table table{};
    const uint32_t factor = shift_factor(nbytes);
    for (uint32_t k = 0; k < 4; ++k) {
        // The map is linear: each entry follows from one with a bit less.
        for (uint32_t bit = 1; bit < 256; bit <<= 1) {
            const uint32_t product = multiply(bit << (8 * k), factor);
            for (uint32_t low = 0; low < bit; ++low) table[k][bit + low] = table[k][low] ^ product;
        }
    }
    return table;
}

[[maybe_unused]] uint32_t shift(const Table& table, uint32_t crc) {
    return table[0][crc & 0xff] ^ table[1][(crc >> 8) & 0xff] ^ table[2][(crc >> 16) & 0xff] ^ table[3][crc >> 24];
}

constexpr auto kByteTables = [] {
    std::array<std::array<uint32_t, 256>, 8> tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int i = 0; i < 8; ++i) crc = (crc & 1) ? (crc >> 1) ^ kPolynomial : crc >> 1;
        tables[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; ++byte) {
        for (size_t k = 1; k < 8; ++k) {
            const uint32_t crc = tables[k - 1][byte];
            tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
        }
    }
    return tables;
}();

// Eight bytes per round; reads bytes one by one, so it works for any byte order.
uint32_t update_portable(uint32_t crc, const unsigned char* data, size_t nbytes) {
    for (; nbytes >= 8; nbytes -= 8, data += 8) {
        uint32_t next = 0;
        for (size_t k = 0; k < 8; ++k) {
            const uint32_t byte = data[k] ^ (k < 4 ? (crc >> (8 * k)) & 0xff : 0);
            next ^= kByteTables[7 - k][byte];
        }
        crc = next;
    }
    for (; nbytes > 0; --nbytes, ++data) crc = (crc >> 8) ^ kByteTables[0][(crc ^ *data) & 0xff];
    return crc;
}

#if defined(__x86_64__)
constexpr size_t kLongBytes = 8192;
constexpr size_t kShortBytes = 256;
constexpr Table kLongShift = shift_table(kLongBytes);
constexpr Table kShortShift = shift_table(kShortBytes);

uint64_t word(const unsigned char* data) {
    uint64_t value;
    std::memcpy(&value, data, sizeof(value));
    return value;
}

// The instruction takes three cycles but one can start in each: three neighbouring streams keep it busy.
template <size_t kStreamBytes>
__attribute__((target("sse4.2"))) uint32_t update_three(uint32_t crc, const unsigned char*& data, size_t& nbytes,
                                                        const Table& table) {
    for (; nbytes >= 3 * kStreamBytes; nbytes -= 3 * kStreamBytes, data += 3 * kStreamBytes) {
        uint64_t crc0 = crc, crc1 = 0, crc2 = 0;
        for (const unsigned char* at = data; at < data + kStreamBytes; at += 8) {
            crc0 = _mm_crc32_u64(crc0, word(at));
            crc1 = _mm_crc32_u64(crc1, word(at + kStreamBytes));
            crc2 = _mm_crc32_u64(crc2, word(at + 2 * kStreamBytes));
        }
        crc = shift(table, static_cast<uint32_t>(crc0)) ^ static_cast<uint32_t>(crc1);
        crc = shift(table, crc) ^ static_cast<uint32_t>(crc2);
    }
    return crc;
}

__attribute__((target("sse4.2"))) uint32_t update_sse42(uint32_t crc, const unsigned char* data, size_t nbytes) {
    crc = update_three<kLongBytes>(crc, data, nbytes, kLongShift);
    crc = update_three<kShortBytes>(crc, data, nbytes, kShortShift);
    for (; nbytes >= 8; nbytes -= 8, data += 8) {
        crc = static_cast<uint32_t>(_mm_crc32_u64(crc, word(data)));
    }
    for (; nbytes > 0; --nbytes, ++data) crc = _mm_crc32_u8(crc, *data);
    return crc;
}
#endif

}  // namespace

uint32_t crc32c(const void* data, size_t nbytes, uint32_t seed) {
    const unsigned char* bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) return ~update_sse42(~seed, bytes, nbytes);
#endif
    return ~update_portable(~seed, bytes, nbytes);
}

uint32_t crc32c_portable(const void* data, size_t nbytes, uint32_t seed) {
    return ~update_portable(~seed, static_cast<const unsigned char*>(data), nbytes);
}

uint32_t crc32c_combine(uint32_t crc1, uint32_t crc2, uint64_t nbytes2) {
    return multiply(crc1, shift_factor(nbytes2)) ^ crc2;
}

}  // namespace greedysnake
