#include "io_engine.h"

#include <unistd.h>

#include <algorithm>

namespace greedysnake::io {

Engine::Engine(const EngineConfig& config)
    : owner_(getpid()), scheduler_(std::make_unique<Scheduler>(config.queue_depth, config.piece_bytes, config.limits)) {
    backend_ = config.use_uring ? make_uring_backend(*scheduler_, config.queue_depth)
                                : make_thread_backend(*scheduler_, std::min(config.num_threads, config.queue_depth));
}

Engine::~Engine() {
    close(true);
    if (!is_in_child()) return;
    // Copies of locks and threads that are the parent's: they can neither be joined nor destroyed.
    (void)backend_.release();
    (void)scheduler_.release();
}

bool Engine::is_in_child() const { return getpid() != owner_; }

std::optional<uint64_t> Engine::submit(const Transfer& transfer) {
    const auto ticket = scheduler_->submit(transfer);
    if (ticket) backend_->wake();
    return ticket;
}

void Engine::close(bool cancel) {
    if (is_in_child()) return;
    const std::lock_guard lock(close_mutex_);
    if (closed_) return;
    scheduler_->stop(cancel);
    backend_->wake();
    backend_->join();
    scheduler_->forget_all();
    closed_ = true;
}

}  // namespace greedysnake::io
