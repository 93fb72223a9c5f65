// Rate limits that make a drive look slower than it is. Bytes are paid for before a piece starts, so a
// transfer of n bytes takes n / rate from the moment it is asked for, as on a drive of that speed.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstddef>

namespace greedysnake::io {

using Clock = std::chrono::steady_clock;

class RateLimit {
  public:
    // 0 means no limit.
    explicit RateLimit(double bytes_per_s) : seconds_per_byte_(bytes_per_s > 0 ? 1.0 / bytes_per_s : 0.0) {}

    // Work arrived where none was waiting: time spent idle earns no more than the burst.
    void begin(Clock::time_point now) { paid_until_ = std::max(paid_until_, now - kBurst); }

    Clock::time_point ready_at(size_t nbytes) const {
        return seconds_per_byte_ == 0.0 ? Clock::time_point::min() : paid_until_ + cost(nbytes);
    }

    void charge(size_t nbytes, Clock::time_point now) {
        paid_until_ = std::max(paid_until_ + cost(nbytes), now - kBurst);
    }

  private:
    // Long enough to make up for a thread that woke late, short enough to stay invisible over a second.
    static constexpr Clock::duration kBurst = std::chrono::milliseconds(5);

    Clock::duration cost(size_t nbytes) const {
        return std::chrono::duration_cast<Clock::duration>(
            std::chrono::duration<double>(static_cast<double>(nbytes) * seconds_per_byte_));
    }

    double seconds_per_byte_;
    Clock::time_point paid_until_{};
};

}  // namespace greedysnake::io
