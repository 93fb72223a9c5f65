// A fixed set of threads that share one loop at a time.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace greedysnake {

// Calls from several threads queue up behind each other. Loop bodies run in the default floating-point
// environment (denormals kept, round to nearest) whatever the caller has set.
class ThreadPool {
  public:
    // One thread without `cpus` means the caller's own. With `cpus`, thread i is pinned to cpus[i].
    ThreadPool(int num_threads, const std::vector<int>& cpus);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return num_threads_; }
    // Waits for the loop in progress, then ends the threads; loops after that throw std::invalid_argument.
    // In a forked child it does nothing.
    void close();

    // Calls body(begin, end) over [0, count) in pieces that start at multiples of `block`. Threads take
    // pieces as they become free, so a core that is busy elsewhere does not hold up the others. `body` must
    // not throw.
    template <class Body>
    void parallel_for(size_t count, size_t block, const Body& body) {
        run({count, block, &body,
             [](const void* context, size_t begin, size_t end) { (*static_cast<const Body*>(context))(begin, end); }});
    }

  private:
    struct Loop {
        size_t count;
        size_t block;
        const void* context;
        void (*call)(const void* context, size_t begin, size_t end);
    };

    void run(const Loop& loop);
    void take_pieces();
    void work();
    void stop_threads();

    // What a forked child, which has no such threads, can neither join nor destroy: it leaves it as it is.
    struct Crew {
        std::vector<std::thread> threads;
        std::condition_variable started;
        std::condition_variable finished;
    };
    bool is_in_child() const;

    const int num_threads_;
    const int owner_;  // the process that made it
    std::unique_ptr<Crew> crew_ = std::make_unique<Crew>();

    std::mutex callers_;  // held for the whole of a loop
    bool closed_ = false;

    std::mutex mutex_;  // guards everything below but the body of the loop
    Loop loop_{};
    size_t next_ = 0;
    uint64_t generation_ = 0;
    size_t num_working_ = 0;
    bool stopping_ = false;
};

}  // namespace greedysnake
