// Compresses and decompresses a range in place: who may write where while others still read.
#include "kernels_compress.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace greedysnake {
namespace {

// The words of a range, cut into segments.
struct Cut {
    size_t num_words, word_bytes;

    size_t num_segments() const { return (num_words + kCompressSegment - 1) / kCompressSegment; }
    size_t table_bytes() const { return num_segments() * sizeof(uint32_t); }
    size_t raw_bytes() const { return num_words * word_bytes; }
    size_t begin(size_t segment) const { return segment * kCompressSegment * word_bytes; }
    // Of the segments before this one.
    size_t end(size_t segment) const { return std::min(begin(segment), raw_bytes()); }
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

// A thread takes so many segments out of the range before it writes any to it: few enough for its stack and its core's
// cache, and enough that it matters little what letting the next thread through takes.
constexpr size_t kStageSegments = 4;

struct Stage {
    alignas(64) uint8_t bytes[kStageSegments * kCompressSegment * sizeof(uint32_t) + kCompressSlack];
};

// A loop without threads has all in one piece.
template <class Work>
auto in_stages(const Work& work) {
    return [&work](size_t first, size_t last) {
        for (; first < last; first += kStageSegments) work(first, std::min(first + kStageSegments, last));
    };
}

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Lets threads through in the order of what they took. They took it in order, so the one whose turn it is always works
// and waits for nobody. Another soon sleeps, and does not yield instead: it may be its core that is needed, and a core
// that is yielded to others is gone for milliseconds.
class Turns {
  public:
    void wait(size_t mine) {
        for (int spins = 0; spins < kSpins; ++spins) {
            if (next_.load(std::memory_order_acquire) == mine) return;
            pause();
        }
        std::unique_lock lock(mutex_);
        passed_.wait(lock, [&] { return next_.load(std::memory_order_acquire) == mine; });
    }
    void pass(size_t next) {
        {
            std::lock_guard lock(mutex_);  // nobody is between looking and sleeping
            next_.store(next, std::memory_order_release);
        }
        passed_.notify_all();
    }

  private:
    static constexpr int kSpins = 200;
    std::atomic<size_t> next_ = 0;
    std::mutex mutex_;
    std::condition_variable passed_;
};

// Compresses all segments towards the begin of the range, without gaps, and fills the table. Returns where they end.
size_t compress_segments(ThreadPool& pool, const CompressionKernels& kernels, const Cut& cut, uint8_t* range,
                         std::vector<uint32_t>& table) {
    Turns turns;
    size_t end = 0;
    const auto work = [&](size_t first, size_t last) {
        Stage stage;
        GroupHeader headers[kMaxCompressGroups];
        size_t nbytes = 0;
        for (size_t i = first; i < last; ++i) {
            const uint8_t* words = range + cut.begin(i);
            const uint32_t entry = table[i] = kernels.measure(words, cut.groups(i), headers);
            kernels.compress(words, cut.groups(i), entry, headers, stage.bytes + nbytes);
            nbytes += length(entry);
        }
        turns.wait(first);
        const size_t begin = end, stop = end = begin + nbytes;
        turns.pass(last);
        // No segment grows, so these go where they were themselves and where those before them were, which are staged.
        if (stop != cut.end(last)) std::memcpy(range + begin, stage.bytes, nbytes);
    };
    pool.parallel_for(cut.num_segments(), kStageSegments, in_stages(work));
    return end;
}

constexpr size_t kNone = ~size_t{0};

// The inverse, from the last segment to the first. Returns one that is not made of groups, if there is any.
size_t decompress_segments(ThreadPool& pool, const CompressionKernels& kernels, const Cut& cut, uint8_t* range,
                           const std::vector<uint32_t>& table) {
    std::vector<size_t> begins = {0};
    for (const uint32_t entry : table) begins.push_back(begins.back() + length(entry));
    Turns turns;
    std::atomic<size_t> malformed = kNone;
    const auto work = [&](size_t first, size_t last) {
        Stage stage;
        const size_t low = table.size() - last, high = table.size() - first;
        const bool all_raw = begins[high] == cut.end(high);
        if (!all_raw) std::memcpy(stage.bytes, range + begins[low], begins[high] - begins[low]);
        turns.wait(first);
        turns.pass(last);
        // Words go where these were themselves and where those behind them were, which are staged.
        for (size_t i = low; i < high && !all_raw; ++i) {
            const uint8_t* from = stage.bytes + (begins[i] - begins[low]);
            if (!kernels.decompress(from, table[i], cut.groups(i), range + cut.begin(i))) malformed = i;
        }
    };
    pool.parallel_for(table.size(), kStageSegments, in_stages(work));
    return malformed;
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
std::vector<uint32_t> read_table(const Cut& cut, const uint8_t* range, size_t num_bytes) {
    if (num_bytes >= cut.raw_bytes() || num_bytes % kCompressAlignment != 0 || num_bytes < cut.table_bytes()) {
        refuse(num_bytes, std::to_string(cut.num_words) + " words of " + std::to_string(cut.word_bytes) +
                              " bytes are compressed to a multiple of " + std::to_string(kCompressAlignment) +
                              " below " + std::to_string(cut.raw_bytes()) + " and with a table of " +
                              std::to_string(cut.table_bytes()));
    }
    std::vector<uint32_t> table(cut.num_segments());
    std::memcpy(table.data(), range + num_bytes - cut.table_bytes(), cut.table_bytes());
    size_t segments_bytes = 0;
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
    std::vector<uint32_t> table(cut.num_segments());
    const size_t segments_bytes = compress_segments(pool, kernels, cut, range, table);
    const size_t num_bytes = cut.compressed_bytes(segments_bytes);
    if (num_bytes >= cut.raw_bytes()) {
        decompress_segments(pool, kernels, cut, range, table);  // seldom any work: nearly all segments are raw
        return cut.raw_bytes();
    }
    const size_t table_begin = num_bytes - cut.table_bytes();
    std::memset(range + segments_bytes, 0, table_begin - segments_bytes);
    std::memcpy(range + table_begin, table.data(), cut.table_bytes());
    return num_bytes;
}

void decompress(ThreadPool& pool, const CompressionKernels& kernels, uint8_t* range, size_t num_bytes, size_t num_words,
                size_t word_bytes) {
    const Cut cut{num_words, word_bytes};
    const std::vector<uint32_t> table = read_table(cut, range, num_bytes);
    const size_t malformed = decompress_segments(pool, kernels, cut, range, table);
    if (malformed == kNone) return;
    refuse(num_bytes, "its segment " + std::to_string(malformed) + " is not " + std::to_string(cut.groups(malformed)) +
                          " groups in " + std::to_string(length(table[malformed])) + " bytes");
}

}  // namespace greedysnake
