// Compresses and decompresses a range in place: who may write where while others still read.
#include "kernels_compress.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace greedysnake {
namespace {

// The words of a range, cut into segments.
struct Cut {
    size_t num_words, word_bytes;

    size_t num_segments() const { return (num_words + kCompressSegment - 1) / kCompressSegment; }
    size_t table_bytes() const { return num_segments() * sizeof(uint32_t); }
    size_t raw_bytes() const { return num_words * word_bytes; }
    size_t begin(size_t segment) const { return segment * kCompressSegment * word_bytes; }
    size_t groups(size_t segment) const {
        return std::min(kCompressSegment, num_words - segment * kCompressSegment) / kCompressGroup;
    }
    size_t raw_bytes(size_t segment) const { return groups(segment) * kCompressGroup * word_bytes; }
    size_t compressed_bytes(size_t segments_bytes) const {
        const size_t needed = segments_bytes + table_bytes();
        return (needed + kCompressAlignment - 1) / kCompressAlignment * kCompressAlignment;
    }
};

size_t length(uint32_t entry) { return entry & kCompressLength; }

// A range is worked on in parts, several per thread, so a core that is busy elsewhere does not hold up the others. A
// part is one thread's from begin to end: nothing in it waits for another. One thread has one part, which saves a move.
constexpr size_t kPartsPerThread = 4;
constexpr size_t kMinPartSegments = 32;

class Parts {
  public:
    Parts(const Cut& cut, int num_threads) : num_segments_(cut.num_segments()), count_(1) {
        const size_t most = num_threads == 1 ? 1 : kPartsPerThread * static_cast<size_t>(num_threads);
        count_ = std::clamp(num_segments_ / kMinPartSegments, size_t{1}, most);
    }

    size_t count() const { return count_; }
    // The first segment of a part; of the one behind the last, the end.
    size_t first(size_t part) const { return num_segments_ / count_ * part + std::min(part, num_segments_ % count_); }

    size_t compressed_bytes(const std::vector<uint32_t>& table, size_t part) const {
        size_t nbytes = 0;
        for (size_t i = first(part); i < first(part + 1); ++i) nbytes += length(table[i]);
        return nbytes;
    }

  private:
    size_t num_segments_, count_;
};

// A segment, raw or compressed, taken out of the range.
struct Stage {
    alignas(64) uint8_t bytes[kCompressSegment * sizeof(uint32_t) + kCompressSlack];
};

// Compresses each part to its own begin and fills the table.
void compress_parts(ThreadPool& pool, const CompressionKernels& kernels, const Cut& cut, const Parts& parts,
                    uint8_t* range, std::vector<uint32_t>& table) {
    pool.parallel_for(parts.count(), 1, [&](size_t first, size_t last) {
        Stage stage;
        GroupHeader headers[kMaxCompressGroups];
        for (size_t part = first; part < last; ++part) {
            uint8_t* to = range + cut.begin(parts.first(part));
            for (size_t i = parts.first(part); i < parts.first(part + 1); ++i) {
                const uint8_t* words = range + cut.begin(i);
                std::memcpy(stage.bytes, words, cut.raw_bytes(i));
                const uint32_t entry = table[i] = kernels.measure(stage.bytes, cut.groups(i), headers);
                // No segment grows, so this one ends before the next begins.
                if (to != words || !(entry & kCompressRaw))
                    kernels.compress(stage.bytes, cut.groups(i), entry, headers, to);
                to += length(entry);
            }
        }
    });
}

constexpr size_t kNone = ~size_t{0};

// The inverse, from the last segment of a part to its first. Returns one that is not made of groups, if there is any.
size_t decompress_parts(ThreadPool& pool, const CompressionKernels& kernels, const Cut& cut, const Parts& parts,
                        uint8_t* range, const std::vector<uint32_t>& table) {
    std::atomic<size_t> malformed = kNone;
    pool.parallel_for(parts.count(), 1, [&](size_t first, size_t last) {
        Stage stage;
        for (size_t part = first; part < last; ++part) {
            const uint8_t* from = range + cut.begin(parts.first(part)) + parts.compressed_bytes(table, part);
            for (size_t i = parts.first(part + 1); i-- > parts.first(part);) {
                from -= length(table[i]);
                uint8_t* words = range + cut.begin(i);
                if (from == words && (table[i] & kCompressRaw)) continue;
                std::memcpy(stage.bytes, from, length(table[i]));
                if (!kernels.decompress(stage.bytes, table[i], cut.groups(i), words)) malformed = i;
            }
        }
    });
    return malformed;
}

// From here on threads share a move; what they do between two waits takes longer than starting them.
constexpr size_t kLongMove = size_t{4} << 20;
constexpr size_t kMovePiece = size_t{256} << 10;

void move(ThreadPool& pool, uint8_t* to, const uint8_t* from, size_t nbytes) {
    const size_t distance = static_cast<size_t>(to < from ? from - to : to - from);
    if (distance < kLongMove || pool.num_threads() == 1) {
        std::memmove(to, from, nbytes);
        return;
    }
    // So many bytes at a time overwrite none of their own, only such as were moved before.
    for (size_t done = 0; done < nbytes; done += distance) {
        const size_t wave = std::min(distance, nbytes - done);
        const size_t begin = to < from ? done : nbytes - done - wave;
        pool.parallel_for(wave, kMovePiece, [&](size_t first, size_t last) {
            std::memcpy(to + begin + first, from + begin + first, last - first);
        });
    }
}

[[noreturn]] void refuse(size_t num_bytes, const std::string& reason) {
    throw std::invalid_argument("what these " + std::to_string(num_bytes) +
                                " bytes hold is not a compressed range: " + reason);
}

// Throws unless the entry can be that of the segment.
void check_entry(const Cut& cut, size_t num_bytes, size_t segment, uint32_t entry) {
    const size_t raw_bytes = cut.raw_bytes(segment);
    const bool raw = entry & kCompressRaw;
    if (raw ? length(entry) == raw_bytes && !(entry & kCompressRotated) : length(entry) < raw_bytes) return;
    refuse(num_bytes, "its table has " + std::to_string(entry) + " for segment " + std::to_string(segment) + " of " +
                          std::to_string(raw_bytes) + " bytes");
}

// The table of a compressed range, all of it checked: what it says fits the range exactly.
std::vector<uint32_t> read_table(const Cut& cut, const uint8_t* range, size_t num_bytes, size_t& segments_bytes) {
    if (num_bytes >= cut.raw_bytes() || num_bytes % kCompressAlignment != 0 || num_bytes < cut.table_bytes()) {
        refuse(num_bytes, std::to_string(cut.num_words) + " words of " + std::to_string(cut.word_bytes) +
                              " bytes are compressed to a multiple of " + std::to_string(kCompressAlignment) +
                              " below " + std::to_string(cut.raw_bytes()) + " and with a table of " +
                              std::to_string(cut.table_bytes()));
    }
    std::vector<uint32_t> table(cut.num_segments());
    std::memcpy(table.data(), range + num_bytes - cut.table_bytes(), cut.table_bytes());
    segments_bytes = 0;
    for (size_t i = 0; i < table.size(); ++i) {
        check_entry(cut, num_bytes, i, table[i]);
        segments_bytes += length(table[i]);
    }
    if (cut.compressed_bytes(segments_bytes) != num_bytes) {
        refuse(num_bytes, "the segments in its table have " + std::to_string(segments_bytes));
    }
    return table;
}

}  // namespace

size_t compress(ThreadPool& pool, const CompressionKernels& kernels, uint8_t* range, size_t num_words,
                size_t word_bytes) {
    const Cut cut{num_words, word_bytes};
    const Parts parts(cut, pool.num_threads());
    std::vector<uint32_t> table(cut.num_segments());
    compress_parts(pool, kernels, cut, parts, range, table);
    size_t segments_bytes = 0;
    for (const uint32_t entry : table) segments_bytes += length(entry);
    const size_t num_bytes = cut.compressed_bytes(segments_bytes);
    if (num_bytes >= cut.raw_bytes()) {
        decompress_parts(pool, kernels, cut, parts, range, table);  // seldom any work: nearly all segments are raw
        return cut.raw_bytes();
    }
    size_t end = 0;
    for (size_t part = 0; part < parts.count(); ++part) {
        const size_t nbytes = parts.compressed_bytes(table, part);
        move(pool, range + end, range + cut.begin(parts.first(part)), nbytes);
        end += nbytes;
    }
    const size_t table_begin = num_bytes - cut.table_bytes();
    std::memset(range + segments_bytes, 0, table_begin - segments_bytes);
    std::memcpy(range + table_begin, table.data(), cut.table_bytes());
    return num_bytes;
}

void decompress(ThreadPool& pool, const CompressionKernels& kernels, uint8_t* range, size_t num_bytes, size_t num_words,
                size_t word_bytes) {
    const Cut cut{num_words, word_bytes};
    const Parts parts(cut, pool.num_threads());
    size_t begin = 0;
    const std::vector<uint32_t> table = read_table(cut, range, num_bytes, begin);
    for (size_t part = parts.count(); part-- > 0;) {
        const size_t nbytes = parts.compressed_bytes(table, part);
        begin -= nbytes;
        move(pool, range + cut.begin(parts.first(part)), range + begin, nbytes);
    }
    const size_t malformed = decompress_parts(pool, kernels, cut, parts, range, table);
    if (malformed == kNone) return;
    refuse(num_bytes, "its segment " + std::to_string(malformed) + " is not " + std::to_string(cut.groups(malformed)) +
                          " groups in " + std::to_string(length(table[malformed])) + " bytes");
}

}  // namespace greedysnake
