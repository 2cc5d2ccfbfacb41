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
  // Whether control messages between hosts go through a tree of hosts (control_tree.h), and not
  // from each rank to each other one.
  bool control_tree = false;

  bool same_host(int peer) const { return host_of[peer] == host_of[rank]; }
  int host_count() const;
  // The position of a rank among the ranks of its host.
  int local_index(int of_rank) const;
  int local_size(int of_rank) const;
};

// The highest id and the highest generation that a group can have. The number of a step begins with
// the group's epoch (host/staging.cc).
inline constexpr std::uint32_t kMaxEpoch = (1 << 22) - 1;

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
  // A number that is higher than the epoch of every group that had the lane before.
  std::uint32_t epoch() const { return std::max(static_cast<std::uint32_t>(id), generation); }
  int index_of(int rank) const;  // position in `ranks`, or -1
};

}  // namespace hvdlite
