// Backend for systems without io_uring: a pool of threads, each with one pread or pwrite at a time.
#include <unistd.h>

#include <cerrno>
#include <thread>
#include <vector>

#include "io_backend.h"
#include "io_signals.h"

namespace greedysnake::io {

namespace {

class ThreadBackend : public Backend {
  public:
    ThreadBackend(Scheduler& scheduler, size_t num_threads) : scheduler_(scheduler) {
        const SignalsBlocked signals_blocked;
        try {
            for (size_t i = 0; i < num_threads; i++) threads_.emplace_back([this] { run(); });
        } catch (...) {
            scheduler_.stop(true);
            join();
            throw;
        }
    }

    // The scheduler's own condition variable wakes the pool.
    void wake() override {}

    void join() override {
        for (auto& thread : threads_) thread.join();
        threads_.clear();
    }

  private:
    void run() {
        while (auto piece = scheduler_.take_blocking()) {
            const ssize_t result = piece->is_write()
                                       ? pwrite(piece->fd(), piece->address(), piece->length(), piece->offset())
                                       : pread(piece->fd(), piece->address(), piece->length(), piece->offset());
            const ssize_t code = result < 0 ? -errno : result;
            scheduler_.finish(std::move(piece), code);
        }
    }

    Scheduler& scheduler_;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_thread_backend(Scheduler& scheduler, size_t num_threads) {
    return std::make_unique<ThreadBackend>(scheduler, num_threads);
}

}  // namespace greedysnake::io
