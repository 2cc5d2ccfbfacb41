#include "transport/fabric.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "os/cpu.h"
#include "transport/inproc_channel.h"
#include "transport/shm_channel.h"
#include "transport/tcp_channel.h"

namespace hvdlite {
namespace {

using std::chrono::microseconds;

// A spin is worth two orders of magnitude where a core is free, and nothing where none is.
microseconds spin_time(const Config& config, int local_size) {
  if (config.spin_us >= 0) return microseconds(config.spin_us);
  const int cores = available_cores();
  if (local_size > cores) return microseconds(0);
  return microseconds(2 * local_size > cores ? 20 : 100);
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
  std::vector<bool> seen(topology.size);
  for (const PeerLink& link : links) {
    if (link.rank < 0 || link.rank >= topology.size || link.rank == topology.rank ||
        seen[link.rank]) {
      return misfit("a link names rank " + std::to_string(link.rank));
    }
    seen[link.rank] = true;
    const bool local = topology.same_host(link.rank);
    if (!link.control.valid() || local != link.segment.valid() || local != link.bell.valid() ||
        local == link.data.valid()) {
      return misfit("the link to rank " + std::to_string(link.rank) +
                    " lacks a descriptor or has one too many");
    }
  }
  return Status();
}

std::unique_ptr<Fabric> empty_fabric(Topology topology) {
  auto fabric = std::make_unique<Fabric>();
  fabric->segments.resize(topology.size);
  fabric->bells.resize(topology.size);
  fabric->bell_fds.resize(topology.size);
  fabric->control.resize(topology.size);
  fabric->data.resize(topology.size);
  fabric->topology = std::move(topology);
  return fabric;
}

Status add_local_peer(Fabric& fabric, PeerLink& link) {
  const Topology& topology = fabric.topology;
  const int peer = link.rank;
  Result<std::shared_ptr<Segment>> segment = Segment::map(link.segment);
  HVDLITE_RETURN_IF_ERROR(segment.status());
  fabric.segments[peer] = segment.value();
  fabric.bell_fds[peer] = std::move(link.bell);
  fabric.bells[peer] = Bell(segment.value()->sleeping(), fabric.bell_fds[peer].get());
  const std::size_t capacity = fabric.own_segment->layout().ring_bytes;
  fabric.control[peer] = std::make_unique<ShmChannel>(
      peer, ByteRing(fabric.own_segment->inbound_ring(topology.local_index(peer)), capacity),
      ByteRing(segment.value()->inbound_ring(topology.local_index(topology.rank)), capacity),
      fabric.bells[peer], std::move(link.control));
  return Status();
}

Status attach_all(Fabric& fabric) {
  for (int peer = 0; peer < fabric.topology.size; ++peer) {
    if (fabric.control[peer]) {
      HVDLITE_RETURN_IF_ERROR(fabric.control[peer]->attach(*fabric.waiter));
    }
    if (fabric.data[peer]) HVDLITE_RETURN_IF_ERROR(fabric.data[peer]->attach(*fabric.waiter));
  }
  return Status();
}

Status make_waiter(Fabric& fabric, Fd bell, const Config& config) {
  const int size = fabric.topology.size;
  const int local_size = fabric.topology.local_size(fabric.topology.rank);
  Result<std::unique_ptr<Waiter>> waiter = Waiter::make(
      fabric.own_segment->sleeping(), std::move(bell), spin_time(config, local_size), size);
  HVDLITE_RETURN_IF_ERROR(waiter.status());
  fabric.waiter = std::move(waiter.value());
  return Status();
}

// Joins ranks a and b of one process by in-process channels.
void join(Fabric& a, Fabric& b, std::size_t capacity, bool same_host) {
  const int rank_a = a.topology.rank;
  const int rank_b = b.topology.rank;
  const auto connect = [&](std::vector<std::unique_ptr<Channel>>& of_a,
                           std::vector<std::unique_ptr<Channel>>& of_b) {
    const auto link = std::make_shared<InprocLink>(capacity);
    of_a[rank_b] = std::make_unique<InprocChannel>(rank_b, 0, link, a.bells[rank_b]);
    of_b[rank_a] = std::make_unique<InprocChannel>(rank_a, 1, link, b.bells[rank_a]);
  };
  connect(a.control, b.control);
  if (!same_host) connect(a.data, b.data);
}

}  // namespace

void Fabric::ring_local(const Group& group) const {
  for (const int rank : group.ranks) {
    if (rank != topology.rank && topology.same_host(rank)) bells[rank].ring();
  }
}

void Fabric::close() {
  for (int peer = 0; peer < topology.size; ++peer) {
    if (control[peer]) control[peer]->close();
    if (data[peer]) data[peer]->close();
  }
}

Result<std::unique_ptr<Fabric>> connect_fabric(Topology topology, Fd own_segment, Fd own_bell,
                                               std::vector<PeerLink> links, const Config& config) {
  HVDLITE_RETURN_IF_ERROR(check(topology, links));
  std::unique_ptr<Fabric> fabric = empty_fabric(std::move(topology));
  Result<std::shared_ptr<Segment>> segment = Segment::map(own_segment);
  HVDLITE_RETURN_IF_ERROR(segment.status());
  fabric->own_segment = fabric->segments[fabric->topology.rank] = segment.value();
  HVDLITE_RETURN_IF_ERROR(make_waiter(*fabric, std::move(own_bell), config));
  for (PeerLink& link : links) {
    if (fabric->topology.same_host(link.rank)) {
      HVDLITE_RETURN_IF_ERROR(add_local_peer(*fabric, link));
    } else {
      fabric->control[link.rank] =
          std::make_unique<TcpChannel>(link.rank, std::move(link.control), config.peer_timeout);
      fabric->data[link.rank] =
          std::make_unique<TcpChannel>(link.rank, std::move(link.data), config.peer_timeout);
    }
  }
  HVDLITE_RETURN_IF_ERROR(attach_all(*fabric));
  return fabric;
}

Result<std::vector<std::unique_ptr<Fabric>>> make_inproc_world(const std::vector<int>& host_of,
                                                               const Config& config) {
  const int size = static_cast<int>(host_of.size());
  std::vector<std::unique_ptr<Fabric>> world;
  // One eventfd a rank, shared by all bells: it lives as long as any fabric of the world.
  const auto bells = std::make_shared<std::vector<Fd>>();
  for (int rank = 0; rank < size; ++rank) {
    world.push_back(empty_fabric({rank, size, host_of}));
    Result<std::shared_ptr<Segment>> segment =
        Segment::in_process(SegmentLayout::make(world[rank]->topology.local_size(rank), config));
    HVDLITE_RETURN_IF_ERROR(segment.status());
    world[rank]->own_segment = segment.value();
    bells->push_back(make_bell());
    Fd own(::dup(bells->back().get()));
    if (!own.valid()) return system_error("eventfd", errno);
    HVDLITE_RETURN_IF_ERROR(make_waiter(*world[rank], std::move(own), config));
  }
  for (auto& fabric : world) {
    fabric->shared = bells;
    for (int peer = 0; peer < size; ++peer) {
      const std::shared_ptr<Segment>& segment = world[peer]->own_segment;
      // Every rank keeps all segments alive: their flags belong to the bells.
      fabric->rung.push_back(segment);
      if (fabric->topology.same_host(peer)) fabric->segments[peer] = segment;
      fabric->bells[peer] = Bell(segment->sleeping(), (*bells)[peer].get());
    }
  }
  for (int a = 0; a < size; ++a) {
    for (int b = a + 1; b < size; ++b) {
      join(*world[a], *world[b], world[a]->own_segment->layout().ring_bytes,
           host_of[a] == host_of[b]);
    }
  }
  for (auto& fabric : world) HVDLITE_RETURN_IF_ERROR(attach_all(*fabric));
  return world;
}

}  // namespace hvdlite
