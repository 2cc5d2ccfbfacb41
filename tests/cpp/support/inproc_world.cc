#include "support/inproc_world.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "transport/topology.h"

namespace hvdlite {
namespace {

constexpr std::size_t kAlignment = 64;

std::size_t stride(std::size_t capacity) {
  return (ByteRing::footprint(capacity) + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

InprocLink::InprocLink(std::size_t capacity)
    : memory(2 * stride(capacity) + kAlignment), capacity(capacity) {}

std::byte* InprocLink::ring(int direction) {
  const auto start = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::uintptr_t aligned = (start + kAlignment - 1) / kAlignment * kAlignment;
  return memory.data() + (aligned - start) + static_cast<std::size_t>(direction) * stride(capacity);
}

InprocChannel::InprocChannel(int peer, int end, std::shared_ptr<InprocLink> link,
                             WakeUp peer_wake_up)
    : ShmChannel(peer, ByteRing(link->ring(1 - end), link->capacity),
                 ByteRing(link->ring(end), link->capacity), peer_wake_up),
      end_(end),
      link_(std::move(link)) {}

Status InprocChannel::attach(Waiter& waiter) {
  waiter.watch_flag(std::shared_ptr<const std::atomic<bool>>(link_, &link_->closed[1 - end_]),
                    peer_);
  return Status();
}

void InprocChannel::close() {
  if (!link_->closed[end_].exchange(true)) peer_wake_up_.send();
}

namespace {

// A rank gets so many: sanitizers have less address space than the system.
constexpr std::uint64_t kMostGradientBytes = 8 << 20;

// The memory that wake-ups point into. It lives as long as any fabric of the world, because each
// fabric may ring any rank.
struct WorldMemory {
  std::vector<std::shared_ptr<Segment>> segments;  // Each rank has one.
  std::vector<Fd> events;                          // Each rank has its eventfd here.
};

Status add_rank(WorldMemory& memory, const Topology& topology, const Config& config) {
  SegmentLayout layout = SegmentLayout::make(topology.local_size(topology.rank), config);
  layout.gradient_bytes = std::min(layout.gradient_bytes, kMostGradientBytes);
  Result<std::shared_ptr<Segment>> segment = make_segment(layout);
  HVDLITE_RETURN_IF_ERROR(segment.status());
  memory.segments.push_back(segment.value());
  memory.events.push_back(make_event());
  if (!memory.events.back().valid()) return system_error("eventfd", errno);
  return Status();
}

Status fill(Fabric& fabric, const std::shared_ptr<WorldMemory>& memory, const Config& config) {
  const Topology& topology = fabric.topology;
  for (int peer = 0; peer < topology.size; ++peer) {
    // The pointer shares ownership of all memory, not only of this segment.
    const std::shared_ptr<Segment> segment(memory, memory->segments[peer].get());
    if (peer == topology.rank) fabric.own_segment = segment;
    if (topology.same_host(peer)) fabric.segments[peer] = segment;
    fabric.wake_ups[peer] = WakeUp(segment->sleeping(), memory->events[peer].get());
  }
  Fd own(::dup(memory->events[topology.rank].get()));
  if (!own.valid()) return system_error("dup", errno);
  return fabric.open(std::move(own), config);
}

void connect(Fabric& a, Fabric& b) {
  const int rank_a = a.topology.rank;
  const int rank_b = b.topology.rank;
  const std::size_t capacity = a.own_segment->layout().ring_bytes;
  const auto link = [&](std::vector<std::unique_ptr<Channel>>& of_a,
                        std::vector<std::unique_ptr<Channel>>& of_b) {
    const auto shared = std::make_shared<InprocLink>(capacity);
    of_a[rank_b] = std::make_unique<InprocChannel>(rank_b, 0, shared, a.wake_ups[rank_b]);
    of_b[rank_a] = std::make_unique<InprocChannel>(rank_a, 1, shared, b.wake_ups[rank_a]);
  };
  if (!a.topology.control_tree || ControlTree(a.topology).linked(rank_b)) {
    link(a.control, b.control);
  }
  if (!a.topology.same_host(rank_b)) return link(a.data, b.data);
  a.data[rank_b] = make_ring_channel(a, rank_b);
  b.data[rank_a] = make_ring_channel(b, rank_a);
}

}  // namespace

Result<std::shared_ptr<Segment>> make_segment(const SegmentLayout& layout) {
  const Result<Fd> memfd = Segment::create(layout);
  HVDLITE_RETURN_IF_ERROR(memfd.status());
  return Segment::map(memfd.value());
}

Result<std::vector<std::unique_ptr<Fabric>>> make_inproc_world(const std::vector<int>& host_of,
                                                               const Config& config,
                                                               bool control_tree) {
  const int size = static_cast<int>(host_of.size());
  std::vector<std::unique_ptr<Fabric>> world;
  const auto memory = std::make_shared<WorldMemory>();
  for (int rank = 0; rank < size; ++rank) {
    world.push_back(std::make_unique<Fabric>(Topology{rank, size, host_of, control_tree}));
    HVDLITE_RETURN_IF_ERROR(add_rank(*memory, world[rank]->topology, config));
  }
  for (auto& fabric : world) HVDLITE_RETURN_IF_ERROR(fill(*fabric, memory, config));
  for (int a = 0; a < size; ++a) {
    for (int b = a + 1; b < size; ++b) connect(*world[a], *world[b]);
  }
  for (auto& fabric : world) HVDLITE_RETURN_IF_ERROR(fabric->attach());
  return world;
}

}  // namespace hvdlite
