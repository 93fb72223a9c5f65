// Chooses an instruction set and computes what every instruction set shares.
#include <cmath>
#include <stdexcept>

#include "kernels.h"

namespace greedysnake {

AdamWScalars adamw_scalars(double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step,
                           double grad_scale) {
    const double correction1 = 1.0 - std::pow(beta1, static_cast<double>(step));
    const double correction2 = 1.0 - std::pow(beta2, static_cast<double>(step));
    const double root2 = std::sqrt(correction2);
    return {
        .grad_scale = static_cast<float>(grad_scale),
        .rate1 = static_cast<float>(beta1 < 0.5 ? beta1 : 1.0 - beta1),
        .rate2 = static_cast<float>(beta2 < 0.5 ? beta2 : 1.0 - beta2),
        .base1_is_new = beta1 < 0.5,
        .base2_is_new = beta2 < 0.5,
        .step_size = static_cast<float>(lr * root2 / correction1),
        .eps = static_cast<float>(eps * root2),
        .decay = static_cast<float>(lr * weight_decay),
    };
}

uint32_t rounding_key(uint32_t seed, int64_t step) { return lowbias32(seed ^ lowbias32(static_cast<uint32_t>(step))); }

std::vector<std::string> available_isas() {
    std::vector<std::string> isas{"scalar"};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
        isas.push_back("avx2");
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            isas.push_back("avx512");
        }
    }
#endif
    return isas;
}

const KernelTable& kernels_for(std::string_view isa) {
    const std::vector<std::string> isas = available_isas();
    if (isa == "auto") isa = isas.back();
    for (const std::string& name : isas) {
        if (name != isa) continue;
#if defined(__x86_64__)
        if (name == "avx2") return kAvx2Kernels;
        if (name == "avx512") return kAvx512Kernels;
#endif
        return kScalarKernels;
    }
    std::string message = "instruction set \"" + std::string(isa) + "\" is not available here: use \"auto\"";
    for (const std::string& name : isas) message += " or \"" + name + "\"";
    throw std::invalid_argument(message);
}

void memory_pass(ThreadPool& pool, void* data, size_t nbytes) {
    constexpr size_t kLineWords = 8;
    struct Group {
        uint64_t line[4][kLineWords];
    };
    Group* groups = static_cast<Group*>(data);
    pool.parallel_for(nbytes / sizeof(Group), 2048, [groups](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
            for (size_t j = 0; j < 3; ++j) {
                for (size_t k = 0; k < kLineWords; ++k) groups[i].line[j][k] ^= groups[i].line[3][k];
            }
        }
    });
}

}  // namespace greedysnake
