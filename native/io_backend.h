// How bytes are moved. A backend owns its threads: they take pieces from the scheduler until it is stopped
// and drained.
#pragma once
#include <memory>
#include <string>

#include "io_scheduler.h"

namespace greedysnake::io {

class Backend {
  public:
    virtual ~Backend() = default;
    virtual void wake() = 0;  // called after a submit or a stop; may come late, even after join()
    virtual void join() = 0;  // the scheduler has been stopped: returns when all threads have ended
};

struct Probe {
    int error;         // 0 when io_uring can be used
    std::string step;  // what was being tried, and the system's words for the error
};
Probe probe_uring();

// Both throw std::system_error when the system refuses what they need.
std::unique_ptr<Backend> make_uring_backend(Scheduler& scheduler, size_t depth);
std::unique_ptr<Backend> make_thread_backend(Scheduler& scheduler, size_t num_threads);

}  // namespace greedysnake::io
