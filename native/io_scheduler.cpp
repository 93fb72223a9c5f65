#include "io_scheduler.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace greedysnake::io {

namespace {

// A drive that answers "try again" for this long (about ten seconds at one try per millisecond) has failed.
constexpr size_t kMaxRetries = 10000;
constexpr auto kRetryPause = std::chrono::milliseconds(1);

void flip_bit(const Piece& piece) {
    const auto bit = static_cast<size_t>(piece.fault->value) % (piece.nbytes * 8);
    piece.request->transfer.address[piece.begin + bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
}

bool has_fault(const Piece& piece, FaultKind kind) { return piece.fault && piece.fault->kind == kind; }

}  // namespace

Scheduler::Scheduler(size_t depth, size_t piece_bytes, const Limits& limits)
    : depth_(depth),
      piece_bytes_(piece_bytes),
      direction_limit_{RateLimit(limits.read_bytes_per_s), RateLimit(limits.write_bytes_per_s)},
      total_limit_(limits.total_bytes_per_s) {}

std::optional<uint64_t> Scheduler::submit(const Transfer& transfer) {
    auto request = std::make_shared<Request>();
    request->transfer = transfer;
    const int is_write = transfer.is_write;

    const std::lock_guard lock(mutex_);
    if (stopped_) return std::nullopt;
    request->sequence = ++last_ticket_;
    request->fault = faults_.pick(transfer.is_write);
    counters_.requests[is_write]++;
    requests_.emplace(request->sequence, request);
    const auto now = Clock::now();
    if (num_queued_[0] + num_queued_[1] == 0) total_limit_.begin(now);
    if (num_queued_[is_write] == 0) direction_limit_[is_write].begin(now);
    num_queued_[is_write]++;
    queues_[transfer.urgent][is_write].push_back(std::move(request));
    note_busy(now);
    work_.notify_one();
    return last_ticket_;
}

Outcome Scheduler::wait(uint64_t ticket) {
    std::unique_lock lock(mutex_);
    const std::shared_ptr<Request> request = requests_.at(ticket);
    request->finished.wait(lock, [&] { return request->is_done(); });
    requests_.erase(ticket);
    return request->outcome;
}

bool Scheduler::poll(uint64_t ticket) {
    const std::lock_guard lock(mutex_);
    return requests_.at(ticket)->is_done();
}

Counters Scheduler::counters() {
    const std::lock_guard lock(mutex_);
    Counters result = counters_;
    if (is_busy_) result.busy_s += std::chrono::duration<double>(Clock::now() - busy_since_).count();
    return result;
}

void Scheduler::add_fault(Fault fault, Direction direction, uint64_t nth, double probability, uint64_t seed) {
    const std::lock_guard lock(mutex_);
    faults_.add(fault, direction, nth, probability, seed);
}

void Scheduler::clear_faults() {
    const std::lock_guard lock(mutex_);
    faults_.clear();
}

void Scheduler::stop(bool cancel) {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    if (cancel) {
        for (auto& [ticket, request] : requests_) {
            if (!request->is_done()) fail(*request, ECANCELED);
        }
        note_busy(Clock::now());
    }
    work_.notify_all();
}

void Scheduler::forget_all() {
    const std::lock_guard lock(mutex_);
    requests_.clear();
}

std::unique_ptr<Piece> Scheduler::take(Clock::time_point* wake_at) {
    const std::lock_guard lock(mutex_);
    return take_locked(Clock::now(), wake_at);
}

std::unique_ptr<Piece> Scheduler::take_blocking() {
    std::unique_lock lock(mutex_);
    while (true) {
        auto wake_at = Clock::time_point::max();
        if (auto piece = take_locked(Clock::now(), &wake_at)) {
            // Wakes run in a chain: each taker calls the next, so one submit never wakes the whole pool.
            if (has_work()) work_.notify_one();
            return piece;
        }
        if (stopped_ && !has_work()) {
            work_.notify_all();
            return nullptr;
        }
        // One sleeper watches the clock for all; the others sleep until they are called.
        if (wake_at < timer_at_) {
            timer_at_ = wake_at;
            work_.wait_until(lock, wake_at);
            timer_at_ = Clock::time_point::max();
        } else {
            work_.wait(lock);
        }
    }
}

std::unique_ptr<Piece> Scheduler::take_locked(Clock::time_point now, Clock::time_point* wake_at) {
    *wake_at = Clock::time_point::max();
    if (in_flight_ >= depth_) return nullptr;
    while (true) {
        auto piece = take_held(now, wake_at);
        if (!piece) {
            piece = cut_next(now, wake_at);
            if (!piece) {
                note_busy(now);  // requests that failed leave the queue without a piece
                return nullptr;
            }
            if (!start(piece, now)) continue;
        }
        in_flight_++;
        counters_.peak_in_flight = std::max(counters_.peak_in_flight, in_flight_);
        return piece;
    }
}

std::unique_ptr<Piece> Scheduler::take_held(Clock::time_point now, Clock::time_point* wake_at) {
    if (held_.empty()) return nullptr;
    const auto first = held_.begin();
    if (first->first > now) {
        *wake_at = std::min(*wake_at, first->first);
        return nullptr;
    }
    auto piece = std::move(first->second);
    held_.erase(first);
    return piece;
}

// Urgent before bulk, then first come first served. A direction held back by its own limit lets the other one
// pass; the total limit lets nothing pass, or bulk pieces would spend what the urgent one saves up for.
std::unique_ptr<Piece> Scheduler::cut_next(Clock::time_point now, Clock::time_point* wake_at) {
    for (const bool urgent : {true, false}) {
        Queue* order[2] = {&queues_[urgent][0], &queues_[urgent][1]};
        if (order[0]->empty() || (!order[1]->empty() && order[1]->front()->sequence < order[0]->front()->sequence)) {
            std::swap(order[0], order[1]);
        }
        for (Queue* queue : order) {
            if (queue->empty()) continue;
            const std::shared_ptr<Request> request = queue->front();
            const int is_write = request->transfer.is_write;
            const size_t nbytes = std::min(piece_bytes_, request->transfer.nbytes - request->next_byte);
            const auto direction_at = direction_limit_[is_write].ready_at(nbytes);
            if (direction_at > now) {
                *wake_at = std::min(*wake_at, direction_at);
                continue;
            }
            const auto total_at = total_limit_.ready_at(nbytes);
            if (total_at > now) {
                *wake_at = std::min(*wake_at, total_at);
                return nullptr;
            }
            direction_limit_[is_write].charge(nbytes, now);
            total_limit_.charge(nbytes, now);
            auto piece = std::make_unique<Piece>();
            piece->request = request;
            piece->begin = request->next_byte;
            piece->nbytes = nbytes;
            request->next_byte += nbytes;
            request->num_pieces_open++;
            if (request->next_byte == request->transfer.nbytes) {
                queue->pop_front();
                num_queued_[is_write]--;
            }
            return piece;
        }
    }
    return nullptr;
}

// Applies a planted fault to a piece that is about to be transferred; false when it does not go to the
// backend now.
bool Scheduler::start(std::unique_ptr<Piece>& piece, Clock::time_point now) {
    const Request& request = *piece->request;
    if (!request.fault) return true;
    const size_t last = (request.transfer.nbytes - 1) / piece_bytes_;
    if (piece->begin / piece_bytes_ != std::min(request.fault->piece, last)) return true;
    const Fault fault = *request.fault;
    switch (fault.kind) {
        case FaultKind::kError:
            settle(std::move(piece), -static_cast<ssize_t>(fault.value), now);
            return false;
        case FaultKind::kEof:
            settle(std::move(piece), 0, now);
            return false;
        case FaultKind::kDelay:
            held_.emplace(now + std::chrono::milliseconds(fault.value), std::move(piece));
            return false;
        case FaultKind::kShort: {
            // Fewer bytes move than are reported, so only a continuation from the aligned position repairs
            // the data.
            const size_t reported = std::min(static_cast<size_t>(fault.value), piece->nbytes - 1);
            const size_t moved = reported / request.transfer.alignment * request.transfer.alignment;
            piece->fault = Fault{fault.kind, static_cast<int64_t>(reported), fault.piece};
            if (moved == 0) {
                settle(std::move(piece), static_cast<ssize_t>(reported), now);
                return false;
            }
            piece->cut_to = moved;
            return true;
        }
        case FaultKind::kFlip:
            piece->fault = fault;
            // The caller's bytes are restored when the write ends.
            if (piece->is_write()) flip_bit(*piece);
            return true;
    }
    return true;
}

void Scheduler::finish(std::unique_ptr<Piece> piece, ssize_t result) {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    --in_flight_;
    if (piece->cut_to != SIZE_MAX) {
        if (result == static_cast<ssize_t>(piece->cut_to)) result = static_cast<ssize_t>(piece->fault->value);
        piece->cut_to = SIZE_MAX;
    }
    settle(std::move(piece), result, now);
    note_busy(now);
    // A piece to be continued is work for a thread of the pool, and the last piece may let all of them end.
    if (has_work() || stopped_) work_.notify_one();
}

// To be called whenever the answer may have changed. A request that waits for a rate limit keeps the drive
// busy: the limit stands for a drive of that speed.
void Scheduler::note_busy(Clock::time_point now) {
    const bool is_busy = in_flight_ > 0 || has_work();
    if (is_busy && !is_busy_) busy_since_ = now;
    if (!is_busy && is_busy_) counters_.busy_s += std::chrono::duration<double>(now - busy_since_).count();
    is_busy_ = is_busy;
}

void Scheduler::settle(std::unique_ptr<Piece> piece, ssize_t result, Clock::time_point now) {
    Request& request = *piece->request;
    if (request.failed) {
        if (result > 0) piece->reached = piece->done + static_cast<size_t>(result);
        return end_piece(*piece);
    }
    if (result == -EINTR || result == -EAGAIN) {
        if (piece->num_retries++ < kMaxRetries) {
            held_.emplace(result == -EAGAIN ? now + kRetryPause : now, std::move(piece));
            return;
        }
    }
    if (result < 0) {
        fail(request, static_cast<int>(-result));
        return end_piece(*piece);
    }
    const size_t reached = piece->done + static_cast<size_t>(result);
    if (reached == piece->nbytes) {
        piece->reached = reached;
        return end_piece(*piece);
    }
    if (reached <= piece->reached) {
        // No progress: a read is at the end of the file; a write that takes nothing has no errno of its own.
        fail(request, request.transfer.is_write ? EIO : 0);
        return end_piece(*piece);
    }
    // O_DIRECT accepts aligned positions only, so the tail of a short transfer is moved again.
    piece->reached = reached;
    piece->done = reached / request.transfer.alignment * request.transfer.alignment;
    held_.emplace(now, std::move(piece));
}

void Scheduler::end_piece(Piece& piece) {
    Request& request = *piece.request;
    if (has_fault(piece, FaultKind::kFlip) && (piece.is_write() || piece.reached == piece.nbytes)) flip_bit(piece);
    request.outcome.got += piece.reached;
    counters_.bytes[request.transfer.is_write] += piece.reached;
    request.num_pieces_open--;
    if (request.is_done()) request.finished.notify_all();
}

// The first error decides. Pieces not yet cut or held for later are dropped; those in flight end by
// themselves.
void Scheduler::fail(Request& request, int error) {
    if (request.failed) return;
    request.failed = true;
    request.outcome.error = error;
    if (request.next_byte < request.transfer.nbytes) {
        Queue& queue = queues_[request.transfer.urgent][request.transfer.is_write];
        queue.erase(std::find_if(queue.begin(), queue.end(), [&](const auto& r) { return r.get() == &request; }));
        num_queued_[request.transfer.is_write]--;
        request.next_byte = request.transfer.nbytes;
    }
    for (auto it = held_.begin(); it != held_.end();) {
        if (it->second->request.get() != &request) {
            ++it;
            continue;
        }
        end_piece(*it->second);
        it = held_.erase(it);
    }
    if (request.is_done()) request.finished.notify_all();
}

bool Scheduler::is_drained() {
    const std::lock_guard lock(mutex_);
    return stopped_ && in_flight_ == 0 && !has_work();
}

}  // namespace greedysnake::io
