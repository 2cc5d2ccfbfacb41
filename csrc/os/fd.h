// Owner of one file descriptor.
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

// Descriptors that belong to this process alone: a child of fork() closes its copies at once, so
// that peers see the parent's death although the child lives on (a forked DataLoader worker).
void close_in_forked_child(int fd);
void forget_in_forked_child(int fd);  // before closing it here
// kForked in a child of fork(), whose engines are the parent's: none of their threads lives here.
Status check_not_forked();
inline bool forked() { return !check_not_forked().ok(); }

}  // namespace hvdlite
