// Decides which piece of which request is transferred next and what a finished transfer means. Knows nothing
// of how bytes are moved: a backend takes pieces, transfers them and reports the result.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "io_faults.h"
#include "io_limits.h"

namespace greedysnake::io {

// The caller owns the memory at `address` and keeps it, and the file, until wait() has returned for the
// ticket.
struct Transfer {
    bool is_write;
    int fd;
    int64_t offset;
    std::byte* address;
    size_t nbytes;
    bool urgent;
    size_t alignment;  // of the file's offsets: 1, or the logical block size with O_DIRECT
};

// error is 0 and got == nbytes: done; error is 0 and got < nbytes: the file ended; else error is the errno.
struct Outcome {
    int error = 0;
    size_t got = 0;
};

struct Counters {
    uint64_t bytes[2] = {0, 0};  // [0] read, [1] written
    uint64_t requests[2] = {0, 0};
    double busy_s = 0;  // time with at least one request that is queued or in flight
    size_t peak_in_flight = 0;
};

struct Request {
    Transfer transfer;
    uint64_t sequence;
    std::optional<Fault> fault;
    size_t next_byte = 0;        // where the next piece begins
    size_t num_pieces_open = 0;  // cut but not finished
    bool failed = false;
    Outcome outcome;
    std::condition_variable finished;

    bool is_done() const { return next_byte == transfer.nbytes && num_pieces_open == 0; }
};

// A part of a request, small enough that an urgent request soon gets its turn.
struct Piece {
    std::shared_ptr<Request> request;
    size_t begin;        // in bytes from the start of the request
    size_t nbytes;       // of the whole piece
    size_t done = 0;     // transferred, rounded down to the alignment
    size_t reached = 0;  // transferred
    size_t num_retries = 0;
    std::optional<Fault> fault;
    size_t cut_to = SIZE_MAX;  // a kShort fault asks for no more than this once

    bool is_write() const { return request->transfer.is_write; }
    int fd() const { return request->transfer.fd; }
    int64_t offset() const { return request->transfer.offset + static_cast<int64_t>(begin + done); }
    std::byte* address() const { return request->transfer.address + begin + done; }
    size_t length() const { return std::min(nbytes - done, cut_to); }
};

struct Limits {
    double read_bytes_per_s;
    double write_bytes_per_s;
    double total_bytes_per_s;
};

// All methods may be called from any thread.
class Scheduler {
  public:
    Scheduler(size_t depth, size_t piece_bytes, const Limits& limits);

    // For the caller.
    std::optional<uint64_t> submit(const Transfer& transfer);  // none once stopped
    Outcome wait(uint64_t ticket);                             // throws std::out_of_range for an unknown ticket
    bool poll(uint64_t ticket);
    Counters counters();
    void add_fault(Fault fault, Direction direction, uint64_t nth, double probability, uint64_t seed);
    void clear_faults();
    void stop(bool cancel);  // refuses new requests; with cancel, pieces not yet started fail with ECANCELED
    void forget_all();       // after the backend has ended: drops the outcomes nobody waited for

    // For the backend. Every piece taken must be finished with the system call's result: bytes or -errno.
    std::unique_ptr<Piece> take(Clock::time_point* wake_at);  // null: nothing to do before *wake_at
    std::unique_ptr<Piece> take_blocking();                   // null: stopped and drained
    void finish(std::unique_ptr<Piece> piece, ssize_t result);
    bool is_drained();

  private:
    using Queue = std::deque<std::shared_ptr<Request>>;

    std::unique_ptr<Piece> take_locked(Clock::time_point now, Clock::time_point* wake_at);
    std::unique_ptr<Piece> take_held(Clock::time_point now, Clock::time_point* wake_at);
    std::unique_ptr<Piece> cut_next(Clock::time_point now, Clock::time_point* wake_at);
    bool start(std::unique_ptr<Piece>& piece, Clock::time_point now);
    void settle(std::unique_ptr<Piece> piece, ssize_t result, Clock::time_point now);
    void end_piece(Piece& piece);
    void fail(Request& request, int error);
    void note_busy(Clock::time_point now);
    bool has_work() const { return num_queued_[0] + num_queued_[1] > 0 || !held_.empty(); }

    const size_t depth_;
    const size_t piece_bytes_;

    std::mutex mutex_;
    std::condition_variable work_;
    Clock::time_point timer_at_ = Clock::time_point::max();  // earliest timed sleep in take_blocking
    bool stopped_ = false;
    uint64_t last_ticket_ = 0;
    std::unordered_map<uint64_t, std::shared_ptr<Request>> requests_;
    Queue queues_[2][2];             // [urgent][is_write], in order of submission
    size_t num_queued_[2] = {0, 0};  // requests in the queues, by direction
    // Pieces that were started and go on later: short transfers, retries, planted delays.
    std::multimap<Clock::time_point, std::unique_ptr<Piece>> held_;
    RateLimit direction_limit_[2];
    RateLimit total_limit_;
    FaultRules faults_;
    size_t in_flight_ = 0;
    bool is_busy_ = false;
    Clock::time_point busy_since_;
    Counters counters_;
};

}  // namespace greedysnake::io
