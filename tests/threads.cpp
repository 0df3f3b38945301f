// A stand-in for the thread functions of PyTorch, on std::thread. PyTorch's own threads are OpenMP's, whose way of waiting
// for each other ThreadSanitizer does not see. `make sanitize` preloads it, so that the library finds it first.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace {
constexpr std::uint32_t THREADS = 4;
thread_local bool inside = false;
}  // namespace

#pragma GCC visibility push(default)
extern "C" {

std::int32_t torch_get_num_threads(std::uint32_t* count) {
  *count = THREADS;
  return 0;
}

std::int32_t torch_parallel_for(
    std::int64_t begin, std::int64_t end, std::int64_t grain_size,
    void (*function)(std::int64_t begin, std::int64_t end, void* context), void* context) {
  const std::int64_t count = end - begin;
  if (count <= 0) return 0;
  const std::int64_t most = grain_size > 0 ? (count + grain_size - 1) / grain_size : THREADS;
  const std::int64_t parts = inside ? 1 : std::min<std::int64_t>(THREADS, most);
  if (parts <= 1) {
    function(begin, end, context);
    return 0;
  }
  const std::int64_t size = (count + parts - 1) / parts;
  std::vector<std::thread> threads;
  for (std::int64_t part = 0; part < parts && part * size < count; part++) {
    threads.emplace_back([=] {
      inside = true;
      function(begin + part * size, std::min(end, begin + (part + 1) * size), context);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}
}
#pragma GCC visibility pop
