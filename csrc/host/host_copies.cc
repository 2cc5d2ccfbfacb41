// The collectives of HostBackend that only copy: allgather, broadcast and alltoall.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "host/host_backend.h"

namespace hvdlite {
namespace {

constexpr const char* kAllgather = "an allgather";
constexpr const char* kBroadcast = "a broadcast";
constexpr const char* kAlltoall = "an alltoall";

void copy(std::span<const std::byte> from, std::byte* to) {
  if (!from.empty() && from.data() != to) std::memmove(to, from.data(), from.size());
}

// The part of `bytes` that starts at `at`, at most `longest` long; empty behind its end.
template <typename Byte>
std::span<Byte> window(std::span<Byte> bytes, std::size_t at, std::size_t longest) {
  if (at >= bytes.size()) return {};
  return bytes.subspan(at, std::min(longest, bytes.size() - at));
}

}  // namespace

template <typename Byte>
struct HostBackend::Parts {
  const Group& group;
  std::span<Byte> data;
  std::span<const std::size_t> bytes;  // by position in the group
  std::vector<std::size_t> begins;

  Parts(const Group& members, std::span<Byte> all, std::span<const std::size_t> lengths)
      : group(members), data(all), bytes(lengths), begins(lengths.size()) {
    std::exclusive_scan(lengths.begin(), lengths.end(), begins.begin(), std::size_t{0});
  }
  std::span<Byte> of(int rank) const {
    const auto i = static_cast<std::size_t>(group.index_of(rank));
    return data.subspan(begins[i], bytes[i]);
  }
};

Status HostBackend::allgather(const Allgather& call, Patience patience) {
  const auto& [group, input, bytes, output] = call;
  const Layout& layout = layout_of(group);
  if (!layout.spans_hosts()) return gather_local(layout, input, bytes, output, patience);
  std::size_t at = 0;
  for (std::size_t i = 0; i < group.ranks.size(); ++i) {
    HVDLITE_RETURN_IF_ERROR(
        broadcast({group, group.ranks[i], input, output.subspan(at, bytes[i])}, patience));
    at += bytes[i];
  }
  return Status();
}

Status HostBackend::gather_local(const Layout& layout, std::span<const std::byte> input,
                                 std::span<const std::size_t> bytes, std::span<std::byte> output,
                                 Patience patience) {
  const std::size_t longest = *std::max_element(bytes.begin(), bytes.end());
  const std::size_t stride = chunk_bytes(layout);
  for (std::size_t begin = 0; begin < longest; begin += stride) {
    const Step step = staging_.begin(layout.locals, patience, kAllgather);
    HVDLITE_RETURN_IF_ERROR(staging_.reuse(step));
    copy(window(input, begin, stride), staging_.own_slot(step));
    staging_.publish(step);
    HVDLITE_RETURN_IF_ERROR(staging_.await_published(step));
    std::size_t at = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      const std::span<std::byte> block = window(output.subspan(at, bytes[i]), begin, stride);
      copy({staging_.slot_of(step, static_cast<int>(i)), block.size()}, block.data());
      at += bytes[i];
    }
    staging_.done(step);
  }
  return Status();
}

Status HostBackend::broadcast(const Broadcast& call, Patience patience) {
  const auto& [group, root, input, output] = call;
  const Layout& layout = layout_of(group);
  const bool is_root = root == fabric_.topology.rank;
  const std::size_t stride = chunk_bytes(layout);
  for (std::size_t begin = 0; begin < output.size(); begin += stride) {
    const auto from = is_root ? window(input, begin, stride) : std::span<const std::byte>();
    HVDLITE_RETURN_IF_ERROR(
        broadcast_chunk(layout, root, from, window(output, begin, stride), patience));
  }
  return Status();
}

Status HostBackend::broadcast_chunk(const Layout& layout, int root,
                                    std::span<const std::byte> input, std::span<std::byte> output,
                                    Patience patience) {
  // On every host one local publishes the chunk: the root, elsewhere the host's first member.
  const int self = fabric_.topology.rank;
  const int root_index = layout.locals.group.index_of(root);
  const int publisher = root_index >= 0 ? root_index : 0;
  const Step step = staging_.begin(layout.locals, patience, kBroadcast);
  if (layout.locals.index == publisher) {
    HVDLITE_RETURN_IF_ERROR(staging_.reuse(step));
    std::byte* slot = staging_.own_slot(step);
    transfers_.clear();
    if (self == root) {
      copy(input, slot);
      for (const auto& ranks : layout.hosts) {
        const bool own_host = std::find(ranks.begin(), ranks.end(), root) != ranks.end();
        if (!own_host) transfers_.push_back({ranks[0], {slot, output.size()}, {}});
      }
      staging_.publish(step);
    } else {
      transfers_.push_back({root, {}, {slot, output.size()}});
    }
    HVDLITE_RETURN_IF_ERROR(exchange_between_hosts(patience, kBroadcast));
    if (self != root) staging_.publish(step);
  } else {
    staging_.publish(step);
    HVDLITE_RETURN_IF_ERROR(staging_.await_published(step, publisher));
  }
  copy({staging_.slot_of(step, publisher), output.size()}, output.data());
  staging_.done(step);
  return Status();
}

Status HostBackend::alltoall(const Alltoall& call, Patience patience) {
  const Layout& layout = layout_of(call.group);
  const Outgoing outgoing(call.group, call.input, call.send_bytes);
  const Incoming incoming(call.group, call.output, call.receive_bytes);
  const int self = fabric_.topology.rank;
  copy(outgoing.of(self), incoming.of(self).data());
  if (layout.locals.group.ranks.size() > 1) {
    HVDLITE_RETURN_IF_ERROR(swap_local(layout, outgoing, incoming, patience));
  }
  return layout.spans_hosts() ? swap_remote(layout, outgoing, incoming, patience) : Status();
}

Status HostBackend::swap_local(const Layout& layout, const Outgoing& outgoing,
                               const Incoming& incoming, Patience patience) {
  const std::vector<int>& ranks = layout.locals.group.ranks;
  const int self = fabric_.topology.rank;
  // A slot holds a part for each local, and before them how many steps its owner needs: nobody
  // knows what the others say to each other.
  const Result<std::uint64_t> share = share_bytes(layout, ranks.size() + 1);
  if (!share.ok()) return share.status();
  const std::size_t stride = share.value();
  const auto offset = [&](int local_index) {
    return (static_cast<std::size_t>(local_index) + 1) * stride;
  };
  std::uint64_t steps = 1;
  for (const int rank : ranks) {
    if (rank != self) steps = std::max(steps, chunk_count(outgoing.of(rank).size(), stride));
  }
  for (std::uint64_t k = 0; k < steps; ++k) {
    const Step step = staging_.begin(layout.locals, patience, kAlltoall);
    HVDLITE_RETURN_IF_ERROR(staging_.reuse(step));
    std::byte* slot = staging_.own_slot(step);
    if (k == 0) std::memcpy(slot, &steps, sizeof(steps));
    for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
      if (i == layout.locals.index) continue;
      copy(window(outgoing.of(ranks[i]), k * stride, stride), slot + offset(i));
    }
    staging_.publish(step);
    HVDLITE_RETURN_IF_ERROR(staging_.await_published(step));
    for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
      if (i == layout.locals.index) continue;
      const std::byte* theirs = staging_.slot_of(step, i);
      std::uint64_t wanted = 0;
      if (k == 0) std::memcpy(&wanted, theirs, sizeof(wanted));
      steps = std::max(steps, wanted);
      const std::span<std::byte> part = window(incoming.of(ranks[i]), k * stride, stride);
      copy({theirs + offset(layout.locals.index), part.size()}, part.data());
    }
    staging_.done(step);
  }
  return Status();
}

Status HostBackend::swap_remote(const Layout& layout, const Outgoing& outgoing,
                                const Incoming& incoming, Patience patience) {
  transfers_.clear();
  for (std::size_t h = 0; h < layout.hosts.size(); ++h) {
    if (h == static_cast<std::size_t>(layout.host)) continue;
    for (const int rank : layout.hosts[h]) {
      transfers_.push_back({rank, outgoing.of(rank), incoming.of(rank)});
    }
  }
  return exchange_between_hosts(patience, kAlltoall);
}

}  // namespace hvdlite
