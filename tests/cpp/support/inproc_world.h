// A world inside one process, for tests: its ranks are threads. Not part of the shipped library.
#pragma once

#include <sys/eventfd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "transport/fabric.h"

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

// A channel between two ranks that are threads of one process: two rings in plain memory, which
// both ends own together. Each end belongs to the thread of its rank.
class InprocChannel : public ShmChannel {
 public:
  // `end` is 0 or 1. `peer_wake_up` outlives the channel.
  InprocChannel(int peer, int end, std::shared_ptr<InprocLink> link, WakeUp peer_wake_up);
  ~InprocChannel() override { close(); }

  Status attach(Waiter& waiter) override;
  void close() override;

 private:
  bool gone() const override { return link_->closed[0].load() || link_->closed[1].load(); }

  int end_;
  std::shared_ptr<InprocLink> link_;
};

// Makes a segment and maps it, for threads as ranks.
Result<std::shared_ptr<Segment>> make_segment(const SegmentLayout& layout);

// Makes one fabric for each of `host_of.size()` ranks. Ranks with the same number in it share
// segments as processes do; in-process channels connect all of them, those for control messages
// only along the tree if there is one. The fabrics may be destroyed in any order.
Result<std::vector<std::unique_ptr<Fabric>>> make_inproc_world(const std::vector<int>& host_of,
                                                               const Config& config,
                                                               bool control_tree = false);

}  // namespace hvdlite
