// Pages of memory, and how many bytes they have. Any thread.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace hvdlite {

inline constexpr std::uint64_t kPage = 4096;
inline constexpr std::uint64_t kHugePage = 2 << 20;

inline std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Asks the kernel for huge pages behind memory that is about to be written as a whole: the page
// faults of fresh memory can cost more than the bytes that go there. Where the system has none to
// give, nothing changes.
inline void prefer_huge_pages(void* memory, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t begin = round_up(address, kHugePage);
  const std::uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  if (begin >= end) return;
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // NOLINT: an address
}

}  // namespace hvdlite
