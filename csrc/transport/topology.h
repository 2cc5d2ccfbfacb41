// Who is where: ranks, and the hosts that they share. Pure values, immutable after construction.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hvdlite {

struct Topology {
  int rank = 0;
  int size = 1;
  std::vector<int> host_of;  // by rank: index of its host, 0.. in order of first appearance

  bool same_host(int peer) const { return host_of[peer] == host_of[rank]; }
  // Ranks of a host, ascending.
  std::vector<int> ranks_on(int host) const;
  int host_count() const;
  // Position of a rank among the ranks of its host.
  int local_index(int of_rank) const;
  int local_size(int of_rank) const;
};

// Highest id and highest generation of a group; numbers of steps begin with it
// (backend/staging.cc).
inline constexpr std::uint32_t kMaxEpoch = (1 << 22) - 1;

// The members of one process set as the data plane sees them. `ranks` ascends. While some of the
// members have joined (hvd.join), the group is what is left of the set, under the same id: each
// change of `ranks` has a higher generation, the same number on every rank. Ids and generations
// are drawn from one ascending counter of the world.
struct Group {
  int id = 0;              // process set id; 0 is the world. Ids of later sets are higher
  std::vector<int> ranks;  // members, ascending
  int lane = 0;            // of progress counters in segments; no other set of this time has it
  std::uint32_t generation = 0;
  // What an average is divided by, where that is not the number of ranks:
  // HVDLITE_AVERAGE_OVER_JOINED counts members that have joined as well.
  int average_over = 0;
  int divisor() const { return average_over > 0 ? average_over : static_cast<int>(ranks.size()); }
  // Higher than that of every group that had the lane before.
  std::uint32_t epoch() const { return std::max(static_cast<std::uint32_t>(id), generation); }
  int index_of(int rank) const;  // position in `ranks`, or -1
};

}  // namespace hvdlite
