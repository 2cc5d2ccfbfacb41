// A channel between two ranks that are threads of one process: two rings in plain memory, which
// both ends own together. Each end belongs to the thread of its rank.
#pragma once

#include <sys/eventfd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "transport/channel.h"

namespace hvdlite {

// An eventfd for a new Waiter; it is invalid when the system has none left (errno says why).
inline Fd make_event() { return Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }

// What both ends share.
struct InprocLink {
  explicit InprocLink(std::size_t capacity);
  std::vector<std::byte> memory;  // Both rings lie in it, aligned by hand.
  std::size_t capacity;
  std::byte* ring(int direction);
  std::atomic<bool> closed[2] = {false, false};  // Each end has one.
};

class InprocChannel : public Channel {
 public:
  // `end` is 0 or 1. `peer_wake_up` outlives the channel.
  InprocChannel(int peer, int end, std::shared_ptr<InprocLink> link, WakeUp peer_wake_up);
  ~InprocChannel() override { close(); }

  Result<std::size_t> try_write(std::span<const std::byte> bytes) override {
    return rings_.write(bytes, gone());
  }
  Result<std::size_t> try_read(std::span<std::byte> bytes) override {
    return rings_.read(bytes, gone());
  }
  Status attach(Waiter& waiter) override;
  void close() override;

 private:
  bool gone() const;
  int end_;
  std::shared_ptr<InprocLink> link_;
  RingPair rings_;  // in the memory of the link
};

}  // namespace hvdlite
