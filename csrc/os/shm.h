// Owner of a memory mapping: a shared memfd, or private anonymous memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/status.h"
#include "os/fd.h"

namespace hvdlite {

class Mapping {
 public:
  static Result<Mapping> shared(const Fd& memfd, std::uint64_t bytes);
  static Result<Mapping> anonymous(std::uint64_t bytes);  // zeroed, page-aligned
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  Mapping(std::byte* data, std::uint64_t bytes) : data_(data), bytes_(bytes) {}
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// An anonymous file of that size, close-on-exec, sealed against shrinking. Nothing of it stays
// behind when the processes end, and a small /dev/shm does not limit it.
Result<Fd> create_memfd(std::uint64_t bytes);
// kInternal unless nobody can shrink it any more, under those who have it mapped.
Status check_sealed(const Fd& memfd);
// Size of a file: kInternal when it cannot be read.
Result<std::uint64_t> file_bytes(const Fd& fd);

}  // namespace hvdlite
