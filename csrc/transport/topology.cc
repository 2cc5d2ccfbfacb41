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

namespace {

int parent_of(int host) { return (host - 1) / 2; }

// Returns the host next to `from` on the way to `to`.
int step(int from, int to) {
  for (int at = to; at > from; at = parent_of(at)) {
    if (parent_of(at) == from) return at;
  }
  return parent_of(from);
}

bool passes(int from, int to, int through) {
  for (int at = from; at != to; at = step(at, to)) {
    if (at == through) return true;
  }
  return to == through;
}

}  // namespace

ControlTree::ControlTree(const Topology& topology)
    : topology_(topology), leaders_(topology.host_count(), -1), hop_to_(topology.size, -1) {
  const int own_host = topology.host_of[topology.rank];
  for (int rank = topology.size - 1; rank >= 0; --rank) leaders_[topology.host_of[rank]] = rank;
  const int leader = leaders_[own_host];
  leads_ = leader == topology.rank;
  if (leads_ && own_host != 0) parent_ = leaders_[parent_of(own_host)];
  for (int rank = 0; rank < topology.size; ++rank) {
    if (rank == topology.rank) continue;
    const int host = topology.host_of[rank];
    if (host == own_host) {
      hop_to_[rank] = rank;
    } else {
      hop_to_[rank] = leads_ ? leaders_[step(own_host, host)] : leader;
    }
    if (leads_ && hop_to_[rank] != parent_) below_.push_back(rank);
  }
}

std::vector<int> ControlTree::behind(int leader) const {
  std::vector<int> ranks;
  const int own_host = topology_.host_of[topology_.rank];
  const int its_host = topology_.host_of[leader];
  if (leaders_[its_host] != leader) return ranks;
  for (int rank = 0; rank < topology_.size; ++rank) {
    const int host = topology_.host_of[rank];
    if (rank == leader || rank == topology_.rank || host == own_host) continue;
    if (passes(own_host, host, its_host)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace hvdlite
