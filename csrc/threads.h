// Work shared among torch's own threads.
#pragma once

#include <cstdint>

#include "arguments.h"

namespace multihead {

// How many threads an operation may use, as torch.set_num_threads says.
inline int threads() {
  std::uint32_t count = 1;
  check(torch_get_num_threads(&count), "tell its number of threads");
  return static_cast<int>(count);
}

// Calls function(begin, end) on parts of 0 ... count - 1, of `grain` or more each, on several threads if there are enough;
// inside of such a call, in this thread. Parts are consecutive and of about one size.
template <typename Function>
void parallel(std::int64_t count, std::int64_t grain, const Function& function) {
  const auto call = [](std::int64_t begin, std::int64_t end, void* context) {
    (*static_cast<const Function*>(context))(begin, end);
  };
  check(torch_parallel_for(0, count, grain, call, const_cast<Function*>(&function)), "finish the work of all threads");
}

}  // namespace multihead
