// Owner of one file descriptor, which the destructor closes. One thread at a time.
#pragma once

#include <utility>

#include "base/status.h"

namespace hvdlite {

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

}  // namespace hvdlite
