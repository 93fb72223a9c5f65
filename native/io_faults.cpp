#include "io_faults.h"

namespace greedysnake::io {

void FaultRules::add(Fault fault, Direction direction, uint64_t nth, double probability, uint64_t seed) {
    rules_.push_back({fault, direction, nth, probability, std::mt19937_64(seed)});
}

std::optional<Fault> FaultRules::pick(bool is_write) {
    std::optional<Fault> picked;
    for (Rule& rule : rules_) {
        if (rule.direction == (is_write ? Direction::kRead : Direction::kWrite)) continue;
        // Every rule counts every matching request, picked or not, so that rules do not shift one another.
        rule.num_seen++;
        const double draw = static_cast<double>(rule.random() >> 11) * 0x1.0p-53;
        const bool hit = rule.nth > 0 ? rule.num_seen == rule.nth : draw < rule.probability;
        if (hit && !picked) picked = rule.fault;
    }
    return picked;
}

}  // namespace greedysnake::io
