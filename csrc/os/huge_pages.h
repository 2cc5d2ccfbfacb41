// Any thread.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace hvdlite {

// Asks the kernel for huge pages behind memory that is about to be written as a whole: the page
// faults of fresh memory can cost more than the bytes that go there. Where the system has none to
// give, nothing changes.
inline void prefer_huge_pages(void* memory, std::size_t bytes) {
  constexpr std::uintptr_t kHugePage = 2 << 20;
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  if (begin >= end) return;
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // NOLINT: an address
}

}  // namespace hvdlite
