// The way that control messages take between the hosts of a large world.
//
// The first rank of each host is its *leader*. The leaders form a binary tree: the parent of host h
// is host (h - 1) / 2, and rank 0 is its root. Two ranks are *linked*, and have a control channel,
// where they share a host, or where their hosts are parent and child and both are leaders. All
// other messages are passed on from link to link: so a rank of n hosts has as many links as its
// host has ranks, and three more, and a message passes at most 2 log2(n) leaders.
//
// A pure value, immutable after construction.
#pragma once

#include <vector>

#include "transport/topology.h"

namespace hvdlite {

class ControlTree {
 public:
  explicit ControlTree(const Topology& topology);

  // Whether this rank has a control channel to `rank`.
  bool linked(int rank) const { return hop_to_[rank] == rank; }
  // The linked rank to which a message for `rank` goes; -1 for this rank itself.
  int hop_to(int rank) const { return hop_to_[rank]; }
  // The leader to which a leader's messages to rank 0 go; -1 at rank 0, and where this rank is not
  // a leader.
  int parent() const { return parent_; }
  bool leads() const { return leads_; }
  // A leader's ranks whose messages to rank 0 it passes on, ascending; empty elsewhere.
  const std::vector<int>& below() const { return below_; }
  // The ranks that this rank cannot reach without this other one, ascending.
  std::vector<int> behind(int leader) const;

 private:
  Topology topology_;
  std::vector<int> leaders_;  // Each host has one.
  std::vector<int> hop_to_;   // Each rank has one.
  std::vector<int> below_;
  int parent_ = -1;
  bool leads_ = false;
};

}  // namespace hvdlite
