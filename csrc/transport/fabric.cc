#include "transport/fabric.h"

#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "base/cpu.h"
#include "transport/channel.h"
#include "transport/topology.h"

namespace hvdlite {
namespace {

using std::chrono::microseconds;

// A spin makes a wait two orders of magnitude faster where a core is free, and helps nothing
// otherwise: then a wait yields.
AwakeTimes awake_times(const Config& config, int local_size) {
  if (config.spin_us >= 0) return {.spin = microseconds(config.spin_us)};
  const int cores = available_cores();
  if (local_size > cores) return {.yield = microseconds(200)};
  if (2 * local_size > cores) return {.spin = microseconds(20), .yield = microseconds(100)};
  return {.spin = microseconds(100)};
}

Status misfit(const std::string& what) {
  return Status(StatusCode::kInvalidArgument, "the links do not fit the topology: " + what);
}

Status check(const Topology& topology, const std::vector<PeerLink>& links) {
  if (topology.rank < 0 || topology.rank >= topology.size ||
      topology.host_of.size() != static_cast<std::size_t>(topology.size)) {
    return misfit("rank, size and host_of contradict each other");
  }
  if (links.size() + 1 != static_cast<std::size_t>(topology.size)) {
    return misfit("one link per peer is needed");
  }
  const ControlTree tree(topology);
  std::vector<bool> seen(topology.size);
  for (const PeerLink& link : links) {
    if (link.rank < 0 || link.rank >= topology.size || link.rank == topology.rank ||
        seen[link.rank]) {
      return misfit("a link names rank " + std::to_string(link.rank));
    }
    seen[link.rank] = true;
    const bool local = topology.same_host(link.rank);
    const bool controls = !topology.control_tree || tree.linked(link.rank);
    if (controls != link.control.valid() || local != link.segment.valid() ||
        local != link.event.valid() || local == link.data.valid()) {
      return misfit("the link to rank " + std::to_string(link.rank) +
                    " lacks a descriptor or has one too many");
    }
  }
  return Status();
}

Status add_local_peer(Fabric& fabric, PeerLink& link) {
  const Topology& topology = fabric.topology;
  const int peer = link.rank;
  HVDLITE_ASSIGN_OR_RETURN(std::shared_ptr<Segment> segment, Segment::map(link.segment));
  fabric.segments[peer] = segment;
  fabric.event_fds[peer] = std::move(link.event);
  fabric.wake_ups[peer] = WakeUp(segment->sleeping(), fabric.event_fds[peer].get());
  fabric.control[peer] = std::make_unique<ShmChannel>(
      peer, fabric.own_segment->control_ring(topology.local_index(peer)),
      segment->control_ring(topology.local_index(topology.rank)), fabric.wake_ups[peer],
      std::move(link.control));
  fabric.data[peer] = make_ring_channel(fabric, peer);
  return Status();
}

}  // namespace

Fabric::Fabric(Topology its_topology)
    : topology(std::move(its_topology)),
      segments(topology.size),
      wake_ups(topology.size),
      event_fds(topology.size),
      control(topology.size),
      data(topology.size) {}

Status Fabric::open(Fd own_event, const Config& config) {
  gradients = std::make_shared<GradientArea>(own_segment);
  const int local_size = topology.local_size(topology.rank);
  HVDLITE_ASSIGN_OR_RETURN(waiter, Waiter::make(own_segment->sleeping(), std::move(own_event),
                                                awake_times(config, local_size), topology.size));
  if (config.spin_us >= 0) waiter->always_spin();
  return Status();
}

Status Fabric::attach() {
  for (int peer = 0; peer < topology.size; ++peer) {
    if (control[peer]) HVDLITE_RETURN_IF_ERROR(control[peer]->attach(*waiter));
    if (data[peer]) HVDLITE_RETURN_IF_ERROR(data[peer]->attach(*waiter));
  }
  return Status();
}

void Fabric::ring_local(const Group& group) const {
  for (const int rank : group.ranks) {
    if (rank != topology.rank && topology.same_host(rank)) wake_ups[rank].send();
  }
}

void Fabric::close() {
  for (int peer = 0; peer < topology.size; ++peer) {
    if (control[peer]) control[peer]->close();
    if (data[peer]) data[peer]->close();
  }
  if (!lifeline.valid()) return;
  ::shutdown(lifeline.get(), SHUT_RDWR);
  lifeline.reset();
}

std::unique_ptr<Channel> make_ring_channel(const Fabric& fabric, int peer) {
  const Topology& topology = fabric.topology;
  // A quarter of a ring at once: so the one side writes while the other reads.
  return std::make_unique<ShmChannel>(
      peer, fabric.own_segment->data_ring(topology.local_index(peer)),
      fabric.segments[peer]->data_ring(topology.local_index(topology.rank)), fabric.wake_ups[peer],
      Fd(), fabric.own_segment->layout().data_ring_bytes / 4);
}

Result<std::unique_ptr<Fabric>> connect_fabric(Topology topology, OwnLink own,
                                               std::vector<PeerLink> links, const Config& config) {
  HVDLITE_RETURN_IF_ERROR(check(topology, links));
  if (!own.lifeline.valid()) return misfit("this rank's lifeline is missing");
  auto fabric = std::make_unique<Fabric>(std::move(topology));
  close_in_forked_child(own.lifeline.get());
  fabric->lifeline = std::move(own.lifeline);
  HVDLITE_ASSIGN_OR_RETURN(fabric->own_segment, Segment::map(own.segment));
  fabric->segments[fabric->topology.rank] = fabric->own_segment;
  HVDLITE_RETURN_IF_ERROR(fabric->open(std::move(own.event), config));
  for (PeerLink& link : links) {
    if (fabric->topology.same_host(link.rank)) {
      HVDLITE_RETURN_IF_ERROR(add_local_peer(*fabric, link));
    } else {
      if (link.control.valid()) {
        fabric->control[link.rank] =
            std::make_unique<TcpChannel>(link.rank, std::move(link.control), config.peer_timeout);
      }
      fabric->data[link.rank] =
          std::make_unique<TcpChannel>(link.rank, std::move(link.data), config.peer_timeout);
    }
  }
  HVDLITE_RETURN_IF_ERROR(fabric->attach());
  return fabric;
}

}  // namespace hvdlite
