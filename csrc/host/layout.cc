#include "host/layout.h"

#include <algorithm>

#include "kernels/sum_tree.h"

namespace hvdlite {

const HostLayout& HostLayouts::of(const Group& group) {
  HostLayout& layout = layouts_[group.id];
  if (!layout.hosts.empty() && layout.locals.group.generation == group.generation) return layout;
  layout = {};
  std::map<int, std::size_t> index;  // A host of the topology has one in layout.hosts.
  for (const int rank : group.ranks) {
    const auto [found, first] = index.try_emplace(topology_.host_of[rank], layout.hosts.size());
    if (first) layout.hosts.emplace_back();
    layout.hosts[found->second].push_back(rank);
  }
  layout.host = index.at(topology_.host_of[topology_.rank]);
  layout.locals.group = {group.id, layout.hosts[layout.host], group.lane, group.generation};
  layout.locals.index = layout.locals.group.index_of(topology_.rank);
  layout.drivers = static_cast<int>(group.ranks.size());
  for (const auto& ranks : layout.hosts) {
    layout.drivers = std::min(layout.drivers, static_cast<int>(ranks.size()));
  }
  for (const auto& ranks : layout.hosts) {
    layout.counts.push_back(static_cast<int>(ranks.size()));
    if (layout.driver()) layout.peers.push_back(ranks[layout.locals.index]);
  }
  layout.tree = tree_over_hosts(layout.counts);
  return layout;
}

}  // namespace hvdlite
