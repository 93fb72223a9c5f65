#include "io_engine.h"

#include <algorithm>

namespace greedysnake::io {

Engine::Engine(const EngineConfig& config) : scheduler_(config.queue_depth, config.piece_bytes, config.limits) {
    backend_ = config.use_uring ? make_uring_backend(scheduler_, config.queue_depth)
                                : make_thread_backend(scheduler_, std::min(config.num_threads, config.queue_depth));
}

std::optional<uint64_t> Engine::submit(const Transfer& transfer) {
    const auto ticket = scheduler_.submit(transfer);
    if (ticket) backend_->wake();
    return ticket;
}

void Engine::close(bool cancel) {
    const std::lock_guard lock(close_mutex_);
    if (closed_) return;
    scheduler_.stop(cancel);
    backend_->wake();
    backend_->join();
    scheduler_.forget_all();
    closed_ = true;
}

}  // namespace greedysnake::io
