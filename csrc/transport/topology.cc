#include "transport/topology.h"

#include <algorithm>

namespace hvdlite {

std::vector<int> Topology::ranks_on(int host) const {
  std::vector<int> ranks;
  for (int peer = 0; peer < size; ++peer) {
    if (host_of[peer] == host) ranks.push_back(peer);
  }
  return ranks;
}

int Topology::host_count() const { return *std::max_element(host_of.begin(), host_of.end()) + 1; }

int Topology::local_index(int of_rank) const {
  return static_cast<int>(std::count(host_of.begin(), host_of.begin() + of_rank, host_of[of_rank]));
}

int Topology::local_size(int of_rank) const {
  return static_cast<int>(std::count(host_of.begin(), host_of.end(), host_of[of_rank]));
}

int Group::index_of(int rank) const {
  const auto at = std::lower_bound(ranks.begin(), ranks.end(), rank);
  return at != ranks.end() && *at == rank ? static_cast<int>(at - ranks.begin()) : -1;
}

}  // namespace hvdlite
