// What this rank passes on, or has passed on, between ranks that are not linked
// (transport/topology.h): it sorts messages by the link that they leave on, and puts those of
// one link into one bundle.
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
#include <span>
#include <vector>

#include "transport/topology.h"
#include "wire/message.h"

namespace hvdlite {

// What is passed on between ranks that have no channel to each other (transport/topology.h).
//
//   bundle = count:u32 item[count]
//   item   = type:u8 ranks ranks heads count:u32 byte[count]     from whom, to whom, and the body
//   ranks  = count:u32 ( first:u32 length:u32 )[count]     runs of ranks, ascending
//   heads  = count:u8 byte[count] for each sender
//
// Several ranks often say the same: an item has the senders that say it to the same receivers, or
// the receivers that one sender says it to. What of a message is the sender's alone (the stamps of
// a submit) is its head, with which its body begins. Its type is that of a frame, or kEnded: the
// stream of the sender has ended; the body is that of an abort, or empty where the rank has closed
// it. Every length is checked, as in wire/message.h. Pure functions.
struct BundleItem {
  FrameType type = FrameType::kSubmit;
  std::vector<int> from;  // ascending, as are the others
  std::vector<int> to;
  Bytes body;   // behind the heads
  Bytes heads;  // Each sender has one, in their order; all have the same length.

  // The body of the message of one sender, by its position.
  Bytes message(std::size_t sender) const;
};

BundleItem make_bundle_item(FrameType type, int from, int to, std::span<const std::byte> body);

// Appends an item. It joins an earlier one that says the same, where no stream from one rank to
// another gets another order by it.
void add_to_bundle(std::vector<BundleItem>& items, BundleItem item);
Bytes encode_bundle(const std::vector<BundleItem>& items);
bool decode_bundle(std::span<const std::byte> body, int size, std::vector<BundleItem>& items);

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
