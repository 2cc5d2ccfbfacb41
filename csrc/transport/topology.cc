#include "transport/topology.h"

#include <algorithm>

namespace hvdlite {

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
