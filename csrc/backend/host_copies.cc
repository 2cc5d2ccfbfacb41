// The collectives of HostBackend that only copy: allgather and broadcast.
#include <algorithm>
#include <cstring>

#include "backend/host_backend.h"

namespace hvdlite {
namespace {

constexpr const char* kAllgather = "an allgather";
constexpr const char* kBroadcast = "a broadcast";

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

Status HostBackend::allgather(const Group& group, std::span<const std::byte> input,
                              std::span<const std::size_t> bytes, std::span<std::byte> output,
                              Patience patience) {
  const Layout& layout = layout_of(group);
  if (!layout.spans_hosts()) return gather_local(layout, input, bytes, output, patience);
  std::size_t at = 0;
  for (std::size_t i = 0; i < group.ranks.size(); ++i) {
    HVDLITE_RETURN_IF_ERROR(
        broadcast(group, group.ranks[i], input, output.subspan(at, bytes[i]), patience));
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

Status HostBackend::broadcast(const Group& group, int root, std::span<const std::byte> input,
                              std::span<std::byte> output, Patience patience) {
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

}  // namespace hvdlite
