// How the members of a group lie on the hosts.
//
// Words: the *locals* of a group are its members on this host. Let L be the smallest number of
// locals on any host of the group: the *drivers* of a host are its first L locals. Driver l of each
// host works with driver l of the other hosts: they are *peers*. Thread: the engine's runner.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "host/staging.h"
#include "transport/topology.h"

namespace hvdlite {

struct HostLayout {
  Staging::Locals locals;
  std::vector<std::vector<int>> hosts;  // members by host, hosts in order of their lowest rank
  std::size_t host = 0;                 // this rank's host, an index of `hosts`
  int drivers = 1;
  std::vector<int> peers;   // A driver has one of each host, and itself; others have none.
  std::vector<int> counts;  // Each host has so many members.
  std::vector<int> tree;    // The tree over the hosts (kernels/sum_tree.h).

  bool driver() const { return locals.index < drivers; }
  bool spans_hosts() const { return hosts.size() > 1; }
};

// Owns the layouts of the groups in use. A reference that it gives is valid until the group's next
// generation, or forget().
class HostLayouts {
 public:
  explicit HostLayouts(const Topology& topology) : topology_(topology) {}  // borrowed
  // Returns the group's layout, made at the first collective of each of its generations.
  const HostLayout& of(const Group& group);
  void forget(const Group& group) { layouts_.erase(group.id); }

 private:
  const Topology& topology_;
  std::map<int, HostLayout> layouts_;  // The key is a group id.
};

}  // namespace hvdlite
