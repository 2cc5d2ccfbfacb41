#include "support/negotiation_world.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "host/host_backend.h"
#include "support/inproc_world.h"
#include "transport/topology.h"

namespace hvdlite {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kRingBytes = 16 << 10;
constexpr int kMostLooks = 1000;

// Whether negotiation uses a channel between these ranks.
bool needed(const Topology& topology, int peer) {
  if (!topology.control_tree) return topology.rank == 0 || peer == 0;
  const ControlTree tree(topology);
  if (!tree.linked(peer)) return false;
  const Topology theirs{peer, topology.size, topology.host_of, true};
  return tree.leads() || ControlTree(theirs).leads();
}

std::vector<EntryPtr> entries_of(const std::vector<std::string>& names) {
  std::vector<EntryPtr> entries;
  for (const std::string& name : names) {
    auto entry = std::make_shared<Entry>();
    entry->request.name = name;
    entry->request.tensors = {{name, DataType::kFloat32, {1024, 1024}}};
    entry->key = entry->request.key();
    entry->began_at = entry->submitted_at = trace_now();
    entries.push_back(std::move(entry));
  }
  return entries;
}

}  // namespace

Result<std::unique_ptr<NegotiationWorld>> NegotiationWorld::make(const std::vector<int>& host_of,
                                                                 bool control_tree) {
  auto world = std::make_unique<NegotiationWorld>();
  HVDLITE_RETURN_IF_ERROR(world->connect(host_of, control_tree));
  return world;
}

Status NegotiationWorld::connect(const std::vector<int>& host_of, bool control_tree) {
  const int size = static_cast<int>(host_of.size());
  const Config config;
  std::vector<std::unique_ptr<Fabric>> fabrics;
  for (int rank = 0; rank < size; ++rank) {
    auto fabric = std::make_unique<Fabric>(Topology{rank, size, host_of, control_tree});
    fabric->relay_patience = std::chrono::hours(1);
    Result<std::shared_ptr<Segment>> segment = make_segment(SegmentLayout::make(1, config));
    HVDLITE_RETURN_IF_ERROR(segment.status());
    fabric->own_segment = fabric->segments[rank] = segment.value();
    events_.push_back(make_event());
    Fd own(::dup(events_.back().get()));
    if (!own.valid()) return system_error("dup", errno);
    HVDLITE_RETURN_IF_ERROR(fabric->open(std::move(own), config));
    fabrics.push_back(std::move(fabric));
  }
  for (int a = 0; a < size; ++a) {
    for (int b = a + 1; b < size; ++b) {
      if (!needed(fabrics[a]->topology, b)) continue;
      const auto link = std::make_shared<InprocLink>(kRingBytes);
      fabrics[a]->control[b] = std::make_unique<InprocChannel>(b, 0, link, WakeUp());
      fabrics[b]->control[a] = std::make_unique<InprocChannel>(a, 1, link, WakeUp());
    }
  }
  for (auto& fabric : fabrics) {
    HVDLITE_RETURN_IF_ERROR(fabric->attach());
    Rank rank;
    rank.parts =
        std::make_unique<EngineParts>(std::move(fabric), std::make_unique<SelfBackend>(), config,
                                      GpuLibraries(), std::make_unique<Trace>(), nullptr, 0, 0);
    rank.negotiator = std::make_unique<Negotiator>(*rank.parts, /*elastic=*/false);
    ranks_.push_back(std::move(rank));
  }
  return Status();
}

int NegotiationWorld::negotiate(const std::vector<std::string>& names) {
  for (Rank& rank : ranks_) rank.negotiator->submit(entries_of(names));
  std::vector<std::size_t> agreed(ranks_.size());
  for (int look = 1; look <= kMostLooks; ++look) {
    bool complete = true;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      std::vector<Round> rounds;
      const auto begin = Clock::now();
      if (!ranks_[rank].negotiator->receive(rounds).ok()) return 0;
      if (rank == 0) busy_ += Clock::now() - begin;
      for (const Round& round : rounds) agreed[rank] += round.entries.size();
      complete = complete && agreed[rank] == names.size();
    }
    if (complete) return look;
  }
  return 0;
}

}  // namespace hvdlite
