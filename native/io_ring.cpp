#include "io_ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>

namespace greedysnake::io {

namespace {

[[noreturn]] void throw_errno(int error, const char* step) {
    throw std::system_error(error, std::generic_category(), step);
}

int setup(unsigned num_entries, io_uring_params* params) {
    // A busy thread need not be interrupted for completions that it will reap anyway.
    params->flags = IORING_SETUP_COOP_TASKRUN;
    auto fd = syscall(SYS_io_uring_setup, num_entries, params);
    if (fd < 0 && errno == EINVAL) {  // the flag is younger (5.19) than what we need
        *params = {};
        fd = syscall(SYS_io_uring_setup, num_entries, params);
    }
    if (fd < 0) throw_errno(errno, "io_uring_setup");
    return static_cast<int>(fd);
}

size_t rings_bytes(const io_uring_params& params) {
    // One mapping for both rings (5.4) and waiting with a timeout (5.11) keep this file simple.
    constexpr uint32_t needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_EXT_ARG;
    if ((params.features & needed) != needed) throw_errno(ENOSYS, "io_uring features of Linux 5.11");
    return std::max(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                    params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
}

}  // namespace

FileDescriptor::~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

Mapping::Mapping(int fd, size_t nbytes, uint64_t offset) : nbytes_(nbytes) {
    address_ = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
    if (address_ == MAP_FAILED) throw_errno(errno, "mmap of the io_uring");
}

Mapping::~Mapping() { munmap(address_, nbytes_); }

Ring::Ring(unsigned num_entries)
    : fd_(setup(num_entries, &params_)),
      rings_(fd_.get(), rings_bytes(params_), IORING_OFF_SQ_RING),
      entries_(fd_.get(), params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES),
      sq_tail_(rings_.at<unsigned>(params_.sq_off.tail)),
      cq_head_(rings_.at<unsigned>(params_.cq_off.head)),
      cq_tail_(rings_.at<unsigned>(params_.cq_off.tail)),
      completions_(rings_.at<io_uring_cqe>(params_.cq_off.cqes)),
      sq_mask_(*rings_.at<unsigned>(params_.sq_off.ring_mask)),
      cq_mask_(*rings_.at<unsigned>(params_.cq_off.ring_mask)) {
    auto* order = rings_.at<unsigned>(params_.sq_off.array);
    for (unsigned i = 0; i < params_.sq_entries; i++) order[i] = i;
}

void Ring::push(uint8_t opcode, int fd, void* address, uint32_t nbytes, uint64_t offset, uint64_t user_data) {
    io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[*sq_tail_ & sq_mask_];
    entry = {};
    entry.opcode = opcode;
    entry.fd = fd;
    entry.addr = reinterpret_cast<uint64_t>(address);
    entry.len = nbytes;
    entry.off = offset;
    entry.user_data = user_data;
    std::atomic_ref(*sq_tail_).store(*sq_tail_ + 1, std::memory_order_release);
    num_unsubmitted_++;
}

int Ring::enter(bool wait, Clock::time_point until) {
    __kernel_timespec timeout{};
    io_uring_getevents_arg argument{};
    if (until != Clock::time_point::max()) {
        const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(until - Clock::now()).count();
        const auto nanoseconds = std::max<int64_t>(left, 0);
        timeout.tv_sec = nanoseconds / 1'000'000'000;
        timeout.tv_nsec = nanoseconds % 1'000'000'000;
        argument.ts = reinterpret_cast<uint64_t>(&timeout);
    }
    const auto result = syscall(SYS_io_uring_enter, fd_.get(), num_unsubmitted_, wait ? 1u : 0u,
                                IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &argument, sizeof(argument));
    if (result < 0) return errno == ETIME ? 0 : -errno;
    num_unsubmitted_ -= static_cast<unsigned>(result);
    return 0;
}

uint64_t Ring::take_back() {
    // Without a kernel polling thread the tail is read in enter() only, so it may move back here.
    std::atomic_ref(*sq_tail_).store(*sq_tail_ - 1, std::memory_order_release);
    num_unsubmitted_--;
    return entries_.at<io_uring_sqe>(0)[*sq_tail_ & sq_mask_].user_data;
}

bool Ring::pop(Completion* completion) {
    const unsigned head = *cq_head_;
    if (head == std::atomic_ref(*cq_tail_).load(std::memory_order_acquire)) return false;
    const io_uring_cqe& entry = completions_[head & cq_mask_];
    *completion = {entry.user_data, entry.res};
    std::atomic_ref(*cq_head_).store(head + 1, std::memory_order_release);
    return true;
}

}  // namespace greedysnake::io
