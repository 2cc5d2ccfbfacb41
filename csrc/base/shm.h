// Owner of a memory mapping of a shared memfd, which the destructor unmaps. Sizes are in bytes.
// Errors are kInternal and name the system call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/fd.h"
#include "base/status.h"

namespace hvdlite {

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

}  // namespace hvdlite
