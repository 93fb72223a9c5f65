// Lossless compression of words whose exponents differ little between neighbours: AdamW's moments.
// benchmarks/compression.py takes a sixth off fp32 ones and a third off bf16 ones, faster than a drive could take those
// bytes.
//
// Words (fp32 or bf16, any bits) are taken in groups of 64, a group by its top bytes and the bytes below:
//   base, width      one byte each: the least top byte, and how many bits the largest less the least has
//   width planes     8 bytes each: bit i of plane b, a little-endian uint64, is bit b of top byte i less the base
//   the low bytes    of word after word, little endian
// A group of zeros is base 0 and width 255 alone. A segment is 8192 words, the last one perhaps fewer. When any of its
// words has its sign bit set, all are rotated left by a bit first: the top byte is then the exponent, and the sign is
// the lowest bit. A segment that would not shrink is stored as it is. Segments follow each other without gaps; the
// last bytes of the compressed range, whose size is a multiple of 4096, are a table: per segment, a little-endian
// uint32 of its bytes and the two flags below. Between the last segment and the table there are zeros.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels_pool.h"

namespace greedysnake {

static_assert(std::endian::native == std::endian::little, "compressed words are little endian");

constexpr size_t kCompressGroup = 64;
constexpr size_t kCompressSegment = 8192;
constexpr size_t kMaxCompressGroups = kCompressSegment / kCompressGroup;
constexpr size_t kCompressAlignment = 4096;

constexpr uint32_t kCompressRotated = 1u << 31;
constexpr uint32_t kCompressRaw = 1u << 30;
constexpr uint32_t kCompressLength = kCompressRaw - 1;

struct GroupHeader {
    uint8_t base, width;
};
constexpr uint8_t kCompressZeros = 255;

// Of the top bytes of a group.
struct GroupExtent {
    uint32_t smallest, largest;
};

// How far past the end of a compressed segment `decompress` may read, to ignore what it finds.
constexpr size_t kCompressSlack = 64;

// What one instruction set does with one segment, of words of one size. Its words are aligned as their type needs.
struct CompressionKernels {
    // Returns the segment's entry in the table; the headers are those of its groups, if it is not to stay raw.
    uint32_t (*measure)(const void* words, size_t num_groups, GroupHeader* headers);
    // Writes exactly the bytes of the entry.
    void (*compress)(const void* words, size_t num_groups, uint32_t entry, const GroupHeader* headers, uint8_t* to);
    // False when the bytes of the entry are not exactly so many groups; `words` is then partly written.
    bool (*decompress)(const uint8_t* from, uint32_t entry, size_t num_groups, void* words);
};

// Compresses the range in place and returns the bytes it takes now, a multiple of kCompressAlignment. When that would
// not be less, returns its size and leaves it as it was. num_words is a multiple of kCompressGroup. Needs, besides 128
// KiB on the stack of each thread, the table: a 4096th of bf16, an 8192nd of fp32. A pool closed meanwhile may leave a
// scrambled range.
size_t compress(ThreadPool& pool, const CompressionKernels& kernels, uint8_t* range, size_t num_words,
                size_t word_bytes);

// The inverse. Throws std::invalid_argument when the first num_bytes of the range are not what `compress` can have
// written; the range is then perhaps scrambled, and nothing else was touched.
void decompress(ThreadPool& pool, const CompressionKernels& kernels, uint8_t* range, size_t num_bytes, size_t num_words,
                size_t word_bytes);

}  // namespace greedysnake
