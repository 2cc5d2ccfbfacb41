// The ranks of a world and the hosts that they run on. Pure values, immutable after construction.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hvdlite {

struct Topology {
  int rank = 0;
  int size = 1;
  std::vector<int> host_of;  // A rank has its host's index, 0.. in order of first appearance.
  // Whether control messages between hosts go through a tree of hosts (ControlTree), and not
  // from each rank to each other one.
  bool control_tree = false;

  bool same_host(int peer) const { return host_of[peer] == host_of[rank]; }
  int host_count() const;
  // The position of a rank among the ranks of its host.
  int local_index(int of_rank) const;
  int local_size(int of_rank) const;
};

// The highest id and the highest generation that a group can have. The number of a step begins with
// the group's stamp (host/staging.cc).
inline constexpr std::uint32_t kMaxGroupId = (1 << 22) - 1;

// The membership of one process set as data planes see it. While some members have joined
// (hvd.join), the group has the ranks that are left, under the same id. Each change of `ranks` gets
// a higher generation, which is the same number on every rank. Ids and generations come from one
// ascending counter of the world.
struct Group {
  int id = 0;              // process set id; 0 is the world. Later process sets have higher ids
  std::vector<int> ranks;  // members, ascending
  int lane = 0;            // in segments; no other process set of the same time has it
  std::uint32_t generation = 0;
  // The divisor of an average where it is not the number of `ranks`: with
  // HVDLITE_AVERAGE_OVER_JOINED members that have joined count as well. Otherwise 0.
  int average_over = 0;
  int divisor() const { return average_over > 0 ? average_over : static_cast<int>(ranks.size()); }
  // A number that is higher than the stamp of every group that had the lane before.
  std::uint32_t stamp() const { return std::max(static_cast<std::uint32_t>(id), generation); }
  int index_of(int rank) const;  // position in `ranks`, or -1
};

// The way that control messages take between the hosts of a large world.
//
// The first rank of each host is its *leader*. The leaders form a binary tree: the parent of host h
// is host (h - 1) / 2, and rank 0 is its root. Two ranks are *linked*, and have a control channel,
// where they share a host, or where their hosts are parent and child and both are leaders. All
// other messages are passed on from link to link: so a rank of n hosts has as many links as its
// host has ranks, and three more, and a message passes at most 2 log2(n) leaders.
//
// A pure value, immutable after construction.
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
