// Large results: the system hands memory out in pages of 4 KiB, each when it is first written to. For a table of L x S
// numbers that takes as long as making them; pages of 2 MiB take a quarter of that.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace multihead {

// Asks for large pages where a tensor will lie. Only a wish: without them everything is the same, but slower.
inline void ask_for_large_pages(void* data, std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr std::size_t WORTH_IT = std::size_t{16} << 20;
  constexpr std::uintptr_t PAGE = 4096;
  if (bytes < WORTH_IT) return;
  const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(data) + PAGE - 1) / PAGE * PAGE;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / PAGE * PAGE;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace multihead
