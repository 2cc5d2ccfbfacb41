// The allgather of the host data plane, of one or more tensors that travel together.
//
// Words: the *run* of a host is what its members give, one behind the other. (1) Within a host, the
// members give each other their blocks. (2) Each driver takes one slice of every host's run around
// a ring of hosts: it sends that of its own host to the next host, and passes on what comes from
// the host before, piece by piece, while the next piece is on its way. Little data goes from each
// host to all others at once instead. (3) Within a host, the drivers hand on what they have
// received. Bytes cross each link once, from output to output. Thread: the engine's runner.
#pragma once

#include <span>
#include <vector>

#include "host/backend.h"
#include "host/layout.h"
#include "host/plane.h"
#include "host/span_list.h"

namespace hvdlite {

class HostAllgather {
 public:
  // The layout is that of the calls' group. All are borrowed.
  HostAllgather(HostPlane& plane, const HostLayout& layout, Patience patience)
      : plane_(plane), layout_(layout), patience_(patience) {}
  Status run(std::span<const Allgather> calls);

 private:
  using Outputs = SpanList<std::byte>;
  using Inputs = SpanList<const std::byte>;

  // Each local publishes a run, and copies those of the others: that of local i to theirs[i].
  Status spread_within_host(const Inputs& own, const std::vector<Outputs>& theirs);
  Status cross();
  Status cross_directly();
  Status cross_in_ring();
  Status hand_on();
  // A driver's slice of the run of a host.
  Outputs slice(std::size_t host, int driver) const {
    const Outputs& run = runs_[host];
    return run.part(part_of({0, run.bytes()}, 1, layout_.drivers, driver));
  }

  HostPlane& plane_;
  const HostLayout& layout_;
  const Patience patience_;
  std::vector<Outputs> runs_;  // Each host has one, where its part lies in the outputs.
};

}  // namespace hvdlite
