// Backend on io_uring: one thread keeps up to `depth` pieces in the ring, submits and reaps in the same call.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

#include "io_backend.h"
#include "io_ring.h"
#include "io_signals.h"

namespace greedysnake::io {

namespace {

constexpr uint64_t kWakeTag = 0;  // no piece has address 0

FileDescriptor make_eventfd() {
    FileDescriptor fd(eventfd(0, EFD_CLOEXEC));
    if (fd.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    return fd;
}

class UringBackend : public Backend {
  public:
    UringBackend(Scheduler& scheduler, size_t depth)
        : scheduler_(scheduler), depth_(depth), wake_fd_(make_eventfd()), ring_(static_cast<unsigned>(depth) + 1) {
        const SignalsBlocked signals_blocked;
        thread_ = std::thread([this] { run(); });
    }

    void wake() override {
        // Cleared here so that a burst of submits costs one system call.
        if (!asleep_.exchange(false)) return;
        const uint64_t one = 1;
        [[maybe_unused]] const auto written = write(wake_fd_.get(), &one, sizeof(one));
    }

    void join() override { thread_.join(); }

  private:
    void run() {
        while (true) {
            arm_wake();
            auto wake_at = push_ready();
            if (scheduler_.is_drained()) return;
            // A submit between the look at the queue and the sleep must not be lost: announce the sleep, look
            // again.
            asleep_.store(num_open_ < depth_);
            if (num_open_ < depth_) wake_at = push_ready();
            if (!scheduler_.is_drained()) enter(wake_at);
            asleep_.store(false);
            reap();
        }
    }

    void arm_wake() {
        if (wake_armed_) return;
        ring_.push(IORING_OP_READ, wake_fd_.get(), &wake_count_, sizeof(wake_count_), 0, kWakeTag);
        wake_armed_ = true;
    }

    Clock::time_point push_ready() {
        auto wake_at = Clock::time_point::max();
        while (num_open_ < depth_) {
            auto piece = scheduler_.take(&wake_at);
            if (!piece) break;
            const uint8_t opcode = piece->is_write() ? IORING_OP_WRITE : IORING_OP_READ;
            ring_.push(opcode, piece->fd(), piece->address(), static_cast<uint32_t>(piece->length()),
                       static_cast<uint64_t>(piece->offset()), reinterpret_cast<uint64_t>(piece.get()));
            piece.release();  // owned by the ring until its completion
            num_open_++;
        }
        return wake_at;
    }

    void enter(Clock::time_point wake_at) {
        const int result = ring_.enter(true, wake_at);
        if (result == 0 || result == -EINTR) return;
        if (result != -EAGAIN && result != -EBUSY) {
            // The kernel refuses the ring itself. What it has not seen fails; what it has will still
            // complete.
            while (ring_.num_unsubmitted() > 0) close_piece(ring_.take_back(), result);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }

    void reap() {
        Completion completion;
        while (ring_.pop(&completion)) close_piece(completion.user_data, completion.result);
    }

    void close_piece(uint64_t user_data, ssize_t result) {
        if (user_data == kWakeTag) {
            wake_armed_ = false;
            return;
        }
        num_open_--;
        scheduler_.finish(std::unique_ptr<Piece>(reinterpret_cast<Piece*>(user_data)), result);
    }

    Scheduler& scheduler_;
    const size_t depth_;
    FileDescriptor wake_fd_;
    uint64_t wake_count_ = 0;
    bool wake_armed_ = false;
    size_t num_open_ = 0;
    std::atomic<bool> asleep_{false};
    Ring ring_;
    std::thread thread_;
};

// Moves a few bytes through a pipe: some sandboxes allow the setup and refuse the operations.
void try_read_and_write(Ring& ring) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe2");
    const FileDescriptor reader(ends[0]);
    const FileDescriptor writer(ends[1]);
    std::array<char, 4> sent = {'r', 'i', 'n', 'g'};
    std::array<char, 4> received = {};
    const auto move = [&ring](uint8_t opcode, int fd, std::array<char, 4>& data, const char* step) {
        ring.push(opcode, fd, data.data(), data.size(), 0, 1);
        const int entered = ring.enter(true, Clock::time_point::max());
        Completion completion{};
        if (entered < 0) throw std::system_error(-entered, std::generic_category(), "io_uring_enter");
        if (!ring.pop(&completion)) throw std::system_error(EIO, std::generic_category(), step);
        if (completion.result < 0) throw std::system_error(-completion.result, std::generic_category(), step);
    };
    move(IORING_OP_WRITE, writer.get(), sent, "IORING_OP_WRITE");
    move(IORING_OP_READ, reader.get(), received, "IORING_OP_READ");
    if (sent != received) throw std::system_error(EIO, std::generic_category(), "IORING_OP_READ");
}

}  // namespace

Probe probe_uring() {
    try {
        Ring ring(2);
        try_read_and_write(ring);
        return {0, ""};
    } catch (const std::system_error& error) {
        return {error.code().value(), error.what()};
    }
}

std::unique_ptr<Backend> make_uring_backend(Scheduler& scheduler, size_t depth) {
    return std::make_unique<UringBackend>(scheduler, depth);
}

}  // namespace greedysnake::io
