// Everything that connects one rank to its peers, assembled once and owned by its engine.
//
// A world of processes gets it from file descriptors that Python connected and authenticated
// (connect_fabric); tests get N of them for N threads of one process (make_inproc_world).
// Thread: construct and destroy on one thread; in between the engine's runner uses it.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "base/config.h"
#include "base/status.h"
#include "os/fd.h"
#include "transport/channel.h"
#include "transport/segment.h"
#include "transport/topology.h"
#include "transport/waiter.h"

namespace hvdlite {

// What Python hands over for one peer. Descriptors that do not apply are invalid (-1).
struct PeerLink {
  int rank = -1;
  Fd control;  // connected socket: Unix for a peer of this host, else TCP
  Fd data;     // connected TCP socket; other hosts only
  Fd segment;  // the peer's memfd; same host only
  Fd bell;     // the peer's eventfd; same host only
};

struct Fabric {
  Topology topology;
  std::shared_ptr<Segment> own_segment;
  std::vector<std::shared_ptr<Segment>> segments;  // by rank; null on other hosts
  std::vector<Bell> bells;                         // by rank; rings nobody on other hosts
  std::vector<Fd> bell_fds;                        // owners behind `bells`
  std::shared_ptr<void> shared;                    // in-process worlds: owner behind all bells
  std::vector<std::shared_ptr<Segment>> rung;      // ... and of the flags that they look at
  std::vector<std::unique_ptr<Channel>> control;   // by rank; null for self
  std::vector<std::unique_ptr<Channel>> data;      // by rank; null for self and this host
  std::unique_ptr<Waiter> waiter;                  // destroyed first: channels borrow it no more

  // Rings every member of `group` on this host.
  void ring_local(const Group& group) const;
  // Closes all channels, so that every peer sees this rank go. Idempotent.
  void close();
};

// `own_segment` is the memfd that segment.h sized for this rank's local size. kInternal on a system
// call's failure, kInvalidArgument when the links do not fit the topology.
Result<std::unique_ptr<Fabric>> connect_fabric(Topology topology, Fd own_segment, Fd own_bell,
                                               std::vector<PeerLink> links, const Config& config);

// A world of `host_of.size()` ranks inside this process; ranks with the same number share (plain)
// memory as they would share a segment, others are joined by in-process channels.
Result<std::vector<std::unique_ptr<Fabric>>> make_inproc_world(const std::vector<int>& host_of,
                                                               const Config& config);

}  // namespace hvdlite
