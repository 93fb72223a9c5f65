// One io_uring, over the raw system calls. Used by one thread at a time.
#pragma once
#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>

#include "io_limits.h"

namespace greedysnake::io {

class FileDescriptor {
  public:
    FileDescriptor() = default;
    explicit FileDescriptor(int fd) : fd_(fd) {}
    ~FileDescriptor();
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
    FileDescriptor& operator=(FileDescriptor&& other) noexcept;
    int get() const { return fd_; }

  private:
    int fd_ = -1;
};

class Mapping {
  public:
    Mapping(int fd, size_t nbytes, uint64_t offset);  // throws std::system_error
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    template <typename T>
    T* at(size_t byte) const {
        return reinterpret_cast<T*>(static_cast<std::byte*>(address_) + byte);
    }

  private:
    void* address_;
    size_t nbytes_;
};

struct Completion {
    uint64_t user_data;
    int32_t result;
};

class Ring {
  public:
    // Throws std::system_error whose message names the step the kernel refused.
    explicit Ring(unsigned num_entries);

    unsigned num_unsubmitted() const { return num_unsubmitted_; }
    // The caller never has more entries open than the ring was made for.
    void push(uint8_t opcode, int fd, void* address, uint32_t nbytes, uint64_t offset, uint64_t user_data);
    // Submits what was pushed and sleeps until a completion arrives or the time has come; 0 or -errno.
    int enter(bool wait, Clock::time_point until);
    // After enter() failed for good: takes back the newest push, which the kernel has not seen.
    uint64_t take_back();
    bool pop(Completion* completion);

  private:
    io_uring_params params_{};
    FileDescriptor fd_;
    Mapping rings_;
    Mapping entries_;
    unsigned* sq_tail_;
    unsigned* cq_head_;
    unsigned* cq_tail_;
    io_uring_cqe* completions_;
    unsigned sq_mask_;
    unsigned cq_mask_;
    unsigned num_unsubmitted_ = 0;
};

}  // namespace greedysnake::io
