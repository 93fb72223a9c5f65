#include "kernels_pool.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cfenv>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace greedysnake {
namespace {

// torch.set_flush_denormal and similar switches act on the calling thread and are inherited by threads it
// starts.
class DefaultFloatEnvironment {
  public:
#if defined(__x86_64__)
    DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#else
    DefaultFloatEnvironment() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }

  private:
    std::fenv_t saved_;
#endif
};

// Returns 0 or an errno value.
int pin(std::thread& thread, int cpu) {
#if defined(__linux__)
    if (cpu < 0 || cpu >= CPU_SETSIZE) return EINVAL;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
#else
    (void)thread;
    (void)cpu;
    return ENOSYS;
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& cpus) : num_threads_(num_threads), owner_(getpid()) {
    if (num_threads < 1) {
        throw std::invalid_argument("num_threads is " + std::to_string(num_threads) + ": give at least 1");
    }
    if (!cpus.empty() && cpus.size() != static_cast<size_t>(num_threads)) {
        throw std::invalid_argument("cpus names " + std::to_string(cpus.size()) + " CPUs for " +
                                    std::to_string(num_threads) + " threads: give one CPU per thread, or none");
    }
    if (num_threads == 1 && cpus.empty()) return;
    try {
        for (int i = 0; i < num_threads; ++i) {
            crew_->threads.emplace_back([this] { work(); });
            if (cpus.empty()) continue;
            if (pin(crew_->threads.back(), cpus[i]) != 0) {
                throw std::invalid_argument("cannot pin a thread to CPU " + std::to_string(cpus[i]) +
                                            ": give CPUs that this process may use");
            }
        }
    } catch (...) {
        stop_threads();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    close();
    if (is_in_child()) (void)crew_.release();
}

bool ThreadPool::is_in_child() const { return getpid() != owner_; }

void ThreadPool::close() {
    if (is_in_child()) return;
    std::lock_guard caller(callers_);
    closed_ = true;
    stop_threads();
}

void ThreadPool::stop_threads() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    crew_->started.notify_all();
    for (std::thread& thread : crew_->threads) thread.join();
    crew_->threads.clear();
}

void ThreadPool::run(const Loop& loop) {
    std::lock_guard caller(callers_);
    if (closed_) throw std::invalid_argument("the thread pool is closed: make a new one");
    if (loop.count == 0) return;
    if (crew_->threads.empty() || loop.count <= loop.block) {
        DefaultFloatEnvironment environment;
        loop.call(loop.context, 0, loop.count);
        return;
    }
    std::unique_lock lock(mutex_);
    loop_ = loop;
    next_ = 0;
    num_working_ = crew_->threads.size();
    ++generation_;
    crew_->started.notify_all();
    crew_->finished.wait(lock, [this] { return num_working_ == 0; });
}

void ThreadPool::work() {
    DefaultFloatEnvironment environment;
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
        crew_->started.wait(lock, [&] { return stopping_ || generation_ != seen; });
        if (stopping_) return;
        seen = generation_;
        lock.unlock();
        take_pieces();
        lock.lock();
        if (--num_working_ == 0) crew_->finished.notify_one();
    }
}

void ThreadPool::take_pieces() {
    // loop_ is not written again before every thread has left this function.
    std::atomic_ref<size_t> next(next_);
    for (;;) {
        size_t begin = next.fetch_add(loop_.block, std::memory_order_relaxed);
        if (begin >= loop_.count) return;
        size_t rest = loop_.count - begin;
        loop_.call(loop_.context, begin, begin + (rest < loop_.block ? rest : loop_.block));
    }
}

}  // namespace greedysnake
