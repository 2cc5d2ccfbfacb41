// Owners of file descriptors and of memory that processes share. One thread at a time.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/status.h"

namespace hvdlite {

// Owner of one file descriptor, which the destructor closes.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();                                     // closes
  int release() { return std::exchange(fd_, -1); }  // the caller owns it from here on

 private:
  int fd_ = -1;
};

// Descriptors that belong to this process alone. A child of fork() closes its copies of them at
// once, so that peers see the death of the parent although the child lives on (a forked DataLoader
// worker). Any thread.
void close_in_forked_child(int fd);
void forget_in_forked_child(int fd);  // call this before this process closes the descriptor
// kForked in a child of a process that had such descriptors at its fork(), so a living world. The
// engines there belong to the parent, and their threads live in the parent only.
Status check_not_forked();
inline bool forked() { return !check_not_forked().ok(); }

// Owner of a memory mapping of a shared memfd, which the destructor unmaps. Sizes are in bytes.
// Errors are kInternal and name the system call.
class Mapping {
 public:
  static Result<Mapping> shared(const Fd& memfd, std::uint64_t bytes);
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  // Gives pages back to the system. Their next use finds zeros, in every mapping of them.
  void discard(std::uint64_t begin, std::uint64_t bytes) const;
  // Leaves pages out of core dumps, which would otherwise allocate all that were never used.
  void keep_out_of_dumps(std::uint64_t begin, std::uint64_t bytes) const;

  std::byte* data() const { return data_; }

 private:
  Mapping(std::byte* data, std::uint64_t bytes) : data_(data), bytes_(bytes) {}
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// Whether this process may map only so much memory (ulimit -v), used or not.
bool address_space_is_limited();
// Makes an anonymous file of that size, close-on-exec and sealed against shrinking. The file goes
// with the last process that has it, and the size of /dev/shm does not limit it.
Result<Fd> create_memfd(std::uint64_t bytes);
// kInternal unless the file is sealed: a process that can shrink it makes those that have it mapped
// fault.
Status check_sealed(const Fd& memfd);
// The size of a file.
Result<std::uint64_t> file_bytes(const Fd& fd);

// Bytes of a page of memory.
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
