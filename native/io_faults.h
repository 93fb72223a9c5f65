// Faults that tests plant into the I/O engine. A rule picks requests as they are submitted; the scheduler
// then makes one piece of the picked request misbehave, whatever the backend.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

namespace greedysnake::io {

enum class FaultKind {
    kError,  // the piece fails with `value` as errno, without reaching the file
    kShort,  // one transfer reports only `value` bytes; the engine has to continue it
    kEof,    // one transfer reports zero bytes
    kDelay,  // the piece starts `value` milliseconds late
    kFlip,   // bit `value` of the piece's data is flipped
};

struct Fault {
    FaultKind kind;
    int64_t value;
    size_t piece;  // which piece of the request; counted from 0, the last one if there are fewer
};

enum class Direction { kAny, kRead, kWrite };

class FaultRules {
  public:
    // nth counts matching requests from 1, starting now; nth == 0 picks each with `probability`.
    void add(Fault fault, Direction direction, uint64_t nth, double probability, uint64_t seed);
    void clear() { rules_.clear(); }
    // Called once per submitted request; the first rule that picks it wins.
    std::optional<Fault> pick(bool is_write);

  private:
    struct Rule {
        Fault fault;
        Direction direction;
        uint64_t nth;
        double probability;
        std::mt19937_64 random;
        uint64_t num_seen = 0;
    };
    std::vector<Rule> rules_;
};

}  // namespace greedysnake::io
