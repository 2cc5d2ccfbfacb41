// What this rank passes on, or has passed on, between ranks that are not linked
// (transport/control_tree.h): it sorts messages by the link that they leave on, and puts those of
// one link into one bundle (wire/bundle.h).
//
// A leader *holds* what it passes up to rank 0 until all ranks below it, and itself, have submitted
// something that is not answered yet, but not longer than `patience`. So where all ranks submit the
// same, each link of the tree carries one message up and one down, however many ranks there are.
// Nothing else is held.
//
// The control plane owns it; only the runner calls it.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <vector>

#include "transport/control_tree.h"
#include "wire/bundle.h"

namespace hvdlite {

class Relay {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  Relay(const Topology& topology, std::chrono::microseconds patience);

  const ControlTree& tree() const { return tree_; }
  // Queues an item for the ranks of item.to; this rank is not one of them.
  void pass(const BundleItem& item, TimePoint now);
  // This rank has got an answer from rank 0.
  void answered() { set_spoken(rank_, false); }
  // A rank has said its last: it has left, or its stream has ended.
  void left(int rank);
  // Whether ranks that have not left need this one to pass on their messages.
  bool awaited() const { return left_below_ < tree_.below().size(); }

  bool empty() const { return queues_.empty(); }
  // The links for which a bundle is ready; with `all`, also the one for which it is held.
  std::vector<int> ready(TimePoint now, bool all) const;
  Bytes take(int link);
  // When that which is held will be ready at the latest.
  std::optional<TimePoint> held_until() const;

 private:
  void set_spoken(int rank, bool spoken);
  bool holds() const { return !urgent_ && silent_ > 0 && patience_.count() > 0; }

  const int rank_;
  const ControlTree tree_;
  const std::chrono::microseconds patience_;
  std::map<int, std::vector<BundleItem>> queues_;  // The key is a link; none is empty.
  TimePoint since_;                                // The oldest item for the parent came then.
  bool urgent_ = false;                            // an item for the parent is not to be held
  // Says for each rank of those below, and for this one, whether it has spoken since its last
  // answer, and whether it has left.
  std::vector<bool> spoken_;
  std::vector<bool> left_;
  std::size_t silent_ = 0;
  std::size_t left_below_ = 0;
};

}  // namespace hvdlite
