// The I/O engine that Python sees: a scheduler and the backend that works for it.
#pragma once
#include <memory>
#include <mutex>

#include "io_backend.h"
#include "io_scheduler.h"

namespace greedysnake::io {

struct EngineConfig {
    bool use_uring;
    size_t queue_depth;
    size_t num_threads;
    size_t piece_bytes;
    Limits limits;
};

class Engine {
  public:
    explicit Engine(const EngineConfig& config);  // throws std::system_error
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    std::optional<uint64_t> submit(const Transfer& transfer);
    // Refuses new requests, finishes those submitted (or, with cancel, only the pieces in flight), joins all
    // threads. In a forked child, which has no such threads, it does nothing.
    void close(bool cancel);
    Scheduler& scheduler() { return *scheduler_; }

  private:
    bool is_in_child() const;

    const int owner_;  // the process that made it
    std::unique_ptr<Scheduler> scheduler_;
    std::unique_ptr<Backend> backend_;
    std::mutex close_mutex_;
    bool closed_ = false;
};

// What O_DIRECT asks of an open file, from statx; zeros where the kernel does not tell.
struct DirectAlignment {
    bool known;
    uint32_t memory;
    uint32_t offset;
};
DirectAlignment direct_alignment(int fd);

}  // namespace greedysnake::io
