// Who is where: ranks, and the hosts that they share. Pure values, immutable after construction.
#pragma once

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

// The members of one process set as the data plane sees them. `ranks` ascends.
struct Group {
  int id = 0;              // process set id; 0 is the world. Ids of later sets are higher
  std::vector<int> ranks;  // members, ascending
  int lane = 0;            // of progress counters in segments; no other set of this time has it
  int index_of(int rank) const;  // position in `ranks`, or -1
};

}  // namespace hvdlite
