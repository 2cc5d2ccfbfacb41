// Everything that connects one rank to its peers, assembled once and owned by its engine.
//
// A world of processes gets it from file descriptors that Python connected and authenticated
// (connect_fabric); tests get N of them for N threads of one process (testing/inproc_world.h).
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
  // Has no link yet; whoever makes it fills in the fields below, then calls open() and attach().
  explicit Fabric(Topology topology);

  Topology topology;
  std::shared_ptr<Segment> own_segment;
  std::vector<std::shared_ptr<Segment>> segments;  // by rank; null on other hosts
  std::vector<Bell> bells;                         // by rank; rings nobody on other hosts
  std::vector<Fd> bell_fds;                        // owners behind `bells`
  std::vector<std::unique_ptr<Channel>> control;   // by rank; null for self
  std::vector<std::unique_ptr<Channel>> data;      // by rank; null for self and this host
  std::unique_ptr<Waiter> waiter;                  // destroyed first: channels borrow it no more

  // Makes the waiter of `own_segment`, which sleeps on this eventfd.
  Status open(Fd own_bell, const Config& config);
  // Lets the waiter see all channels.
  Status attach();
  // Rings every member of `group` on this host.
  void ring_local(const Group& group) const;
  // Closes all channels, so that every peer sees this rank go. Idempotent.
  void close();
};

// `own_segment` is the memfd that segment.h sized for this rank's local size. kInternal on a system
// call's failure, kInvalidArgument when the links do not fit the topology.
Result<std::unique_ptr<Fabric>> connect_fabric(Topology topology, Fd own_segment, Fd own_bell,
                                               std::vector<PeerLink> links, const Config& config);

}  // namespace hvdlite
