#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <vector>

namespace multihead {

namespace {

struct Candidate {
  const char* name;
  bool supported;
  const Kernel* (*kernel)();
};

// All compiled kernels, the best first.
const std::vector<Candidate>& candidates() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const std::vector<Candidate> all = {
      {"avx512", avx512, kernel_avx512}, {"avx2", avx2, kernel_avx2}, {"baseline", true, kernel_baseline}};
#elif defined(__aarch64__)
  static const std::vector<Candidate> all = {{"neon", true, kernel_neon}};
#else
  static const std::vector<Candidate> all = {{"baseline", true, kernel_baseline}};
#endif
  return all;
}

std::string names(bool supported_only, const char* between) {
  std::string list;
  for (const Candidate& candidate : candidates()) {
    if (supported_only && !candidate.supported) continue;
    if (!list.empty()) list += between;
    list += candidate.name;
  }
  return list;
}

struct Choice {
  const Candidate* candidate;
  std::string error;
};

Choice choose() {
  const char* asked = std::getenv("MULTIHEAD_ISA");
  for (const Candidate& candidate : candidates()) {
    const bool named = asked == nullptr || *asked == '\0' || std::string(asked) == candidate.name;
    if (named && candidate.supported) return {&candidate, ""};
  }
  return {
      nullptr,
      "MULTIHEAD_ISA: expected one of " + names(true, ", ") + " (what this CPU has of " + names(false, ", ") + "), got " +
          asked + ". Leave it out, and the best is taken."};
}

const Candidate& chosen() {
  static const Choice choice = choose();
  if (choice.candidate == nullptr) throw std::runtime_error(choice.error);
  return *choice.candidate;
}

}  // namespace

const Kernel& kernel() { return *chosen().kernel(); }
std::string isa() { return chosen().name; }
std::string isas() { return names(true, ","); }

}  // namespace multihead
