#include "host/allgather.h"

#include <algorithm>

namespace hvdlite {
namespace {

constexpr const char* kAllgather = "an allgather";
// Up to so many bytes of all hosts, one step beats the steps of a ring.
constexpr std::uint64_t kDirectGather = 256 << 10;
// What a host passes on at once.
constexpr std::uint64_t kPiece = 512 << 10;

}  // namespace

Status HostAllgather::run(std::span<const Allgather> calls) {
  Inputs own;
  std::vector<Outputs> theirs(layout_.locals.group.ranks.size());
  runs_.assign(layout_.hosts.size(), {});
  for (const Allgather& call : calls) {
    std::size_t at = 0;
    std::vector<std::span<std::byte>> blocks;  // Each member has one.
    for (const std::size_t bytes : call.bytes) {
      blocks.push_back(call.output.subspan(at, bytes));
      at += bytes;
    }
    const auto block = [&](int rank) {
      return blocks[static_cast<std::size_t>(call.group.index_of(rank))];
    };
    copy_bytes(call.input, block(plane_.rank()).data());
    own.add(call.input);
    for (std::size_t h = 0; h < layout_.hosts.size(); ++h) {
      for (const int rank : layout_.hosts[h]) runs_[h].add(block(rank));
    }
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      theirs[i].add(block(layout_.locals.group.ranks[i]));
    }
  }
  HVDLITE_RETURN_IF_ERROR(spread_within_host(own, theirs));
  if (!layout_.spans_hosts()) return Status();
  if (layout_.driver()) HVDLITE_RETURN_IF_ERROR(cross());
  return hand_on();
}

Status HostAllgather::spread_within_host(const Inputs& own, const std::vector<Outputs>& theirs) {
  if (theirs.size() == 1) return Status();
  Staging& staging = plane_.staging();
  const std::uint64_t stride = plane_.chunk_bytes(layout_);
  std::size_t longest = 0;
  for (const Outputs& one : theirs) longest = std::max(longest, one.bytes());
  if (longest == 0) return Status();
  const auto range = [&](std::uint64_t k) { return Range{k * stride, (k + 1) * stride}; };
  const auto publish = [&](const Staging::Step& step, std::uint64_t k) -> Status {
    HVDLITE_RETURN_IF_ERROR(staging.reuse(step));
    std::byte* to = staging.own_buffer(step);
    own.for_each(range(k), [&](std::span<const std::byte> span) {
      copy_bytes(span, to);
      to += span.size();
    });
    staging.publish(step);
    return Status();
  };
  const auto take = [&](const Staging::Step& step, std::uint64_t k) -> Status {
    HVDLITE_RETURN_IF_ERROR(staging.await_published(step));
    for (int i = 0; i < static_cast<int>(theirs.size()); ++i) {
      if (i == layout_.locals.index) continue;
      const std::byte* from = staging.buffer_of(step, i);
      theirs[static_cast<std::size_t>(i)].for_each(range(k), [&](std::span<std::byte> span) {
        copy_bytes({from, span.size()}, span.data());
        from += span.size();
      });
    }
    staging.done(step);
    return Status();
  };
  return plane_.pipeline(layout_, patience_, kAllgather, chunk_count(longest, stride), publish,
                         take);
}

Status HostAllgather::cross() {
  std::uint64_t bytes = 0;
  for (const Outputs& run : runs_) bytes += run.bytes();
  return bytes <= kDirectGather ? cross_directly() : cross_in_ring();
}

Status HostAllgather::cross_directly() {
  const Outputs own = slice(layout_.host, layout_.locals.index);
  Exchange& exchange = plane_.begin_exchange(patience_, kAllgather);
  for (std::size_t h = 0; h < runs_.size(); ++h) {
    if (h == layout_.host) continue;
    own.for_each({0, own.bytes()},
                 [&](std::span<std::byte> span) { plane_.send(layout_.peers[h], span); });
    const Outputs theirs = slice(h, layout_.locals.index);
    theirs.for_each({0, theirs.bytes()},
                    [&](std::span<std::byte> span) { exchange.receive(layout_.peers[h], span); });
  }
  return plane_.await_moved(exchange.mark());
}

Status HostAllgather::cross_in_ring() {
  const std::size_t hosts = runs_.size();
  const int next = layout_.peers[(layout_.host + 1) % hosts];
  const int before = layout_.peers[(layout_.host + hosts - 1) % hosts];
  Exchange& exchange = plane_.begin_exchange(patience_, kAllgather);
  const auto send = [&](std::span<std::byte> span) { plane_.send(next, span); };
  const Outputs own = slice(layout_.host, layout_.locals.index);
  own.for_each({0, own.bytes()}, send);
  for (std::size_t step = 1; step < hosts; ++step) {
    const Outputs arriving = slice((layout_.host + hosts - step) % hosts, layout_.locals.index);
    const bool passes_on = step + 1 < hosts;
    for (std::uint64_t k = 0; k < chunk_count(arriving.bytes(), kPiece); ++k) {
      const Range piece = chunk_at(arriving.bytes(), kPiece, k);
      arriving.for_each(piece, [&](std::span<std::byte> span) { exchange.receive(before, span); });
      if (!passes_on) continue;
      HVDLITE_RETURN_IF_ERROR(plane_.await_received(exchange.mark()));
      arriving.for_each(piece, send);
    }
  }
  return plane_.await_moved(exchange.mark());
}

Status HostAllgather::hand_on() {
  Inputs own;
  std::vector<Outputs> theirs(layout_.locals.group.ranks.size());
  for (std::size_t h = 0; h < runs_.size(); ++h) {
    if (h == layout_.host) continue;
    for (int driver = 0; driver < layout_.drivers; ++driver) {
      const Outputs taken = slice(h, driver);
      theirs[static_cast<std::size_t>(driver)].add(taken);
      if (driver != layout_.locals.index) continue;
      taken.for_each({0, taken.bytes()}, [&](std::span<std::byte> span) { own.add(span); });
    }
  }
  return spread_within_host(own, theirs);
}

}  // namespace hvdlite
