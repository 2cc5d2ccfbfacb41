// Everything that connects one rank to its peers: segments, wake-ups, channels and the waiter. The
// fabric owns them all, and the engine owns the fabric.
//
// A rank in a process of its own makes its fabric from file descriptors that Python has connected
// and authenticated (connect_fabric); tests make N fabrics for N threads of one process
// (support/inproc_world.h). Thread: one thread constructs and destroys a fabric; in between only
// the engine's runner uses it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "base/config.h"
#include "base/deadline.h"
#include "base/fd.h"
#include "base/status.h"
#include "transport/channel.h"
#include "transport/segment.h"
#include "transport/topology.h"
#include "transport/waiter.h"

namespace hvdlite {

// The descriptors that Python hands over for one peer. Those that do not apply are invalid (-1).
struct PeerLink {
  int rank = -1;
  // Connected TCP socket, invalid where a control tree has no link; for a peer of this host the end
  // of its lifeline.
  Fd control;
  Fd data;     // connected TCP socket; other hosts only
  Fd segment;  // the peer's memfd; same host only
  Fd event;    // the peer's eventfd; same host only
};

// A rank for which this rank waits in a collective that both have begun.
struct SilentPeer {
  int rank = -1;
  Patience waited{0};          // so long nothing of what it owes has come
  const char* operation = "";  // "an allreduce"
  const char* owes = "";       // "has sent nothing"
};

struct Fabric {
  // Makes a fabric without links. Its maker fills in the fields below, then calls open() and
  // attach().
  explicit Fabric(Topology topology);

  Topology topology;
  std::shared_ptr<Segment> own_segment;
  std::vector<std::shared_ptr<Segment>> segments;  // Each rank has one; on other hosts it is null.
  std::shared_ptr<GradientArea> gradients;         // It lies in own_segment.
  std::vector<WakeUp> wake_ups;  // Each rank has one; those of other hosts do nothing.
  std::vector<Fd> event_fds;     // owners behind `wake_ups`
  // Each rank has one. It is null for self, and in a control tree for ranks that are not linked.
  std::vector<std::unique_ptr<Channel>> control;
  std::vector<std::unique_ptr<Channel>> data;  // Each rank has one; it is null for self.
  // How long leaders of a large world hold what they pass up (negotiation/relay.h).
  std::chrono::microseconds relay_patience{200};
  // Waits inside collectives call it on the runner's thread: first after `silence_after`, and then
  // whenever one of them has lasted twice as long. Null: nobody wants to know.
  std::function<void(const SilentPeer&)> on_silence;
  Patience silence_after = kForever;
  // The own end of this rank's lifeline: a socket whose other end all ranks of this host have.
  Fd lifeline;
  std::unique_ptr<Waiter> waiter;  // last, so destroyed first

  // Makes `gradients`, and the waiter, which sleeps on this eventfd and shows that in
  // `own_segment`.
  Status open(Fd own_event, const Config& config);
  // Lets the waiter see all channels.
  Status attach();
  // Rings every member of `group` on this host.
  void ring_local(const Group& group) const;
  // Closes all channels, so that every peer sees that this rank has gone. Idempotent.
  void close();
};

// Makes the data channel to a peer of this host, whose segment and eventfd the fabric has.
std::unique_ptr<Channel> make_ring_channel(const Fabric& fabric, int peer);

// What a rank shows to the ranks of its host.
struct OwnLink {
  Fd segment;  // the memfd that Segment::create() made for this rank's local size
  Fd event;
  Fd lifeline;
};

// Makes the fabric of a rank in a process of its own. kInternal when a system call fails,
// kInvalidArgument when the links do not fit the topology.
Result<std::unique_ptr<Fabric>> connect_fabric(Topology topology, OwnLink own,
                                               std::vector<PeerLink> links, const Config& config);

}  // namespace hvdlite
