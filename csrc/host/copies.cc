#include "host/copies.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/pieces.h"

namespace hvdlite {
namespace {

using Step = Staging::Step;

constexpr const char* kBroadcast = "a broadcast";
constexpr const char* kAlltoall = "an alltoall";
constexpr const char* kBarrier = "a barrier";
constexpr std::size_t kStepsAtOnce = 4;  // An alltoall between hosts has so many under way.

// The part of `bytes` that starts at `at`, at most `longest` long; empty behind its end.
template <typename Byte>
std::span<Byte> window(std::span<Byte> bytes, std::size_t at, std::size_t longest) {
  if (at >= bytes.size()) return {};
  return bytes.subspan(at, std::min(longest, bytes.size() - at));
}

// What an alltoall sends, or receives, by member.
template <typename Byte>
struct Parts {
  const Group& group;
  std::span<Byte> data;
  std::span<const std::size_t> bytes;  // The index is a position in the group.
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
using Outgoing = Parts<const std::byte>;
using Incoming = Parts<std::byte>;

// The local that publishes a broadcast's bytes on this host: the root, elsewhere the first member.
int publisher_of(const HostLayout& layout, int root) {
  return std::max(layout.locals.group.index_of(root), 0);
}

// Brings the root's chunk to this host and into the publisher's buffer.
Status publish_chunk(HostPlane& plane, const HostLayout& layout, const Step& step,
                     const Broadcast& chunk) {
  Staging& staging = plane.staging();
  const bool is_root = chunk.root == plane.rank();
  HVDLITE_RETURN_IF_ERROR(staging.reuse(step));
  const std::span<std::byte> buffer(staging.own_buffer(step), chunk.output.size());
  std::vector<Transfer> transfers;
  if (is_root) {
    copy_bytes(chunk.input, buffer.data());
    for (std::size_t h = 0; h < layout.hosts.size(); ++h) {
      if (h != layout.host) transfers.push_back({layout.hosts[h][0], buffer, {}});
    }
    staging.publish(step);
  } else {
    transfers.push_back({chunk.root, {}, buffer});
  }
  HVDLITE_RETURN_IF_ERROR(plane.exchange().transfer(transfers, step.patience, kBroadcast));
  if (!is_root) staging.publish(step);
  return Status();
}

Status broadcast_chunk(HostPlane& plane, const HostLayout& layout, const Broadcast& chunk,
                       Patience patience) {
  Staging& staging = plane.staging();
  const int publisher = publisher_of(layout, chunk.root);
  const Step step = staging.begin(layout.locals, patience, kBroadcast);
  if (layout.locals.index == publisher) {
    HVDLITE_RETURN_IF_ERROR(publish_chunk(plane, layout, step, chunk));
  } else {
    staging.publish(step);
    HVDLITE_RETURN_IF_ERROR(staging.await_published(step, publisher));
  }
  copy_bytes({staging.buffer_of(step, publisher), chunk.output.size()}, chunk.output.data());
  staging.done(step);
  return Status();
}

Status swap_within_host(HostPlane& plane, const HostLayout& layout, const Outgoing& outgoing,
                        const Incoming& incoming, Patience patience) {
  Staging& staging = plane.staging();
  const std::vector<int>& ranks = layout.locals.group.ranks;
  // A buffer holds a part for each local, and before them how many steps its owner needs: no rank
  // knows what the others send to each other.
  HVDLITE_ASSIGN_OR_RETURN(const std::size_t stride, plane.share_bytes(layout, ranks.size() + 1));
  const auto offset = [&](int local_index) {
    return (static_cast<std::size_t>(local_index) + 1) * stride;
  };
  std::uint64_t steps = 1;
  for (const int rank : ranks) {
    if (rank == plane.rank()) continue;
    steps = std::max(steps, chunk_count(outgoing.of(rank).size(), stride));
  }
  for (std::uint64_t k = 0; k < steps; ++k) {
    const Step step = staging.begin(layout.locals, patience, kAlltoall);
    HVDLITE_RETURN_IF_ERROR(staging.reuse(step));
    std::byte* buffer = staging.own_buffer(step);
    if (k == 0) std::memcpy(buffer, &steps, sizeof(steps));
    for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
      if (i == layout.locals.index) continue;
      copy_bytes(window(outgoing.of(ranks[i]), k * stride, stride), buffer + offset(i));
    }
    staging.publish(step);
    HVDLITE_RETURN_IF_ERROR(staging.await_published(step));
    for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
      if (i == layout.locals.index) continue;
      const std::byte* theirs = staging.buffer_of(step, i);
      std::uint64_t wanted = 0;
      if (k == 0) std::memcpy(&wanted, theirs, sizeof(wanted));
      steps = std::max(steps, wanted);
      const std::span<std::byte> part = window(incoming.of(ranks[i]), k * stride, stride);
      copy_bytes({theirs + offset(layout.locals.index), part.size()}, part.data());
    }
    staging.done(step);
  }
  return Status();
}

// In step s a rank sends to the s-th member after it and receives from the s-th before it: so that
// not all ranks send to the same one. A few steps overlap.
Status swap_between_hosts(HostPlane& plane, const HostLayout& layout, const Outgoing& outgoing,
                          const Incoming& incoming, Patience patience) {
  const std::vector<int>& ranks = outgoing.group.ranks;
  const std::size_t size = ranks.size();
  const auto self = static_cast<std::size_t>(outgoing.group.index_of(plane.rank()));
  const std::vector<int>& locals = layout.locals.group.ranks;
  const auto is_local = [&](int rank) {
    return std::binary_search(locals.begin(), locals.end(), rank);
  };
  Exchange& exchange = plane.exchange().begin(patience, kAlltoall);
  std::vector<std::uint64_t> marks;
  for (std::size_t step = 1; step < size; ++step) {
    if (step > kStepsAtOnce) {
      HVDLITE_RETURN_IF_ERROR(exchange.await_moved(marks[step - 1 - kStepsAtOnce]));
    }
    const int to = ranks[(self + step) % size];
    const int from = ranks[(self + size - step) % size];
    if (!is_local(to)) exchange.send(to, outgoing.of(to));
    if (!is_local(from)) exchange.receive(from, incoming.of(from));
    marks.push_back(exchange.mark());
  }
  return exchange.await_moved(exchange.mark());
}

}  // namespace

Status host_broadcast(HostPlane& plane, const Broadcast& call, Patience patience) {
  const HostLayout& layout = plane.layout_of(call.group);
  const bool is_root = call.root == plane.rank();
  const std::size_t stride = plane.chunk_bytes(layout);
  for (std::size_t begin = 0; begin < call.output.size(); begin += stride) {
    const Broadcast chunk{
        call.group, call.root,
        is_root ? window(call.input, begin, stride) : std::span<const std::byte>(),
        window(call.output, begin, stride)};
    HVDLITE_RETURN_IF_ERROR(broadcast_chunk(plane, layout, chunk, patience));
  }
  return Status();
}

Status host_alltoall(HostPlane& plane, const Alltoall& call, Patience patience) {
  const HostLayout& layout = plane.layout_of(call.group);
  const Outgoing outgoing(call.group, call.input, call.send_bytes);
  const Incoming incoming(call.group, call.output, call.receive_bytes);
  copy_bytes(outgoing.of(plane.rank()), incoming.of(plane.rank()).data());
  if (layout.locals.group.ranks.size() > 1) {
    HVDLITE_RETURN_IF_ERROR(swap_within_host(plane, layout, outgoing, incoming, patience));
  }
  return layout.spans_hosts() ? swap_between_hosts(plane, layout, outgoing, incoming, patience)
                              : Status();
}

Status host_barrier(HostPlane& plane, const Group& group, Patience patience) {
  const HostLayout& layout = plane.layout_of(group);
  Staging& staging = plane.staging();
  const Step step = staging.begin(layout.locals, patience, kBarrier);
  staging.publish(step);
  HVDLITE_RETURN_IF_ERROR(staging.await_published(step));
  if (layout.spans_hosts() && layout.locals.index == 0) {
    std::byte sent{};
    std::vector<std::byte> received(layout.hosts.size());
    std::vector<Transfer> transfers;
    for (std::size_t h = 0; h < layout.hosts.size(); ++h) {
      if (h == layout.host) continue;
      transfers.push_back({layout.hosts[h][0], {&sent, 1}, {&received[h], 1}});
    }
    HVDLITE_RETURN_IF_ERROR(plane.exchange().transfer(transfers, patience, kBarrier));
  }
  staging.reduced(step);
  HVDLITE_RETURN_IF_ERROR(staging.await_reduced(step, 1));
  staging.done(step);
  return Status();
}

namespace {

constexpr const char* kAllgather = "an allgather";
// Up to so many bytes of all hosts, one step beats the steps of a ring.
constexpr std::uint64_t kDirectGather = 256 << 10;
// What a host passes on at once.
constexpr std::uint64_t kPiece = 512 << 10;

// Spans of memory that count as one run of bytes, from 0 on: the blocks of several tensors that
// travel together. A value; the memory is borrowed. Any thread.
template <typename Byte>
class SpanList {
 public:
  void add(std::span<Byte> span) {
    if (span.empty()) return;
    begins_.push_back(bytes_);
    spans_.push_back(span);
    bytes_ += span.size();
  }
  std::size_t bytes() const { return bytes_; }

  // Calls visit(span) for what lies within `range`, in order. The range may end behind the run.
  template <typename Visit>
  void for_each(Range range, Visit&& visit) const {
    if (range.begin >= std::min<std::uint64_t>(range.end, bytes_)) return;
    const auto after = std::upper_bound(begins_.begin(), begins_.end(), range.begin);
    for (auto i = static_cast<std::size_t>(after - begins_.begin()) - 1;
         i < spans_.size() && begins_[i] < range.end; ++i) {
      const std::size_t begin = std::max<std::size_t>(begins_[i], range.begin) - begins_[i];
      const std::size_t end = std::min<std::size_t>(begins_[i] + spans_[i].size(), range.end);
      visit(spans_[i].subspan(begin, end - begins_[i] - begin));
    }
  }
  // The part of the run that lies within `range`.
  SpanList part(Range range) const {
    SpanList result;
    for_each(range, [&](std::span<Byte> span) { result.add(span); });
    return result;
  }
  void add(const SpanList& other) {
    for (const std::span<Byte> span : other.spans_) add(span);
  }

 private:
  std::vector<std::span<Byte>> spans_;
  std::vector<std::size_t> begins_;
  std::size_t bytes_ = 0;
};

class HostAllgather {
 public:
  // `plane` is borrowed.
  HostAllgather(HostPlane& plane, const Group& group, Patience patience)
      : plane_(plane), layout_(plane.layout_of(group)), patience_(patience) {}
  Status run(std::span<const Allgather> calls);

 private:
  using Outputs = SpanList<std::byte>;
  using Inputs = SpanList<const std::byte>;

  // Each local publishes a run, and copies those of the others: that of local i to theirs[i].
  Status spread_within_host(const Inputs& own, const std::vector<Outputs>& theirs);
  Status cross();
  Status cross_directly();
  Status cross_in_ring();
  Status hand_on();
  // A driver's slice of the run of a host.
  Outputs slice(std::size_t host, int driver) const {
    const Outputs& run = runs_[host];
    return run.part(part_of({0, run.bytes()}, 1, layout_.drivers, driver));
  }

  HostPlane& plane_;
  const HostLayout& layout_;
  const Patience patience_;
  std::vector<Outputs> runs_;  // Each host has one, where its part lies in the outputs.
};

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
  Exchange& exchange = plane_.exchange().begin(patience_, kAllgather);
  for (std::size_t h = 0; h < runs_.size(); ++h) {
    if (h == layout_.host) continue;
    own.for_each({0, own.bytes()},
                 [&](std::span<std::byte> span) { exchange.send(layout_.peers[h], span); });
    const Outputs theirs = slice(h, layout_.locals.index);
    theirs.for_each({0, theirs.bytes()},
                    [&](std::span<std::byte> span) { exchange.receive(layout_.peers[h], span); });
  }
  return exchange.await_moved(exchange.mark());
}

Status HostAllgather::cross_in_ring() {
  const std::size_t hosts = runs_.size();
  const int next = layout_.peers[(layout_.host + 1) % hosts];
  const int before = layout_.peers[(layout_.host + hosts - 1) % hosts];
  Exchange& exchange = plane_.exchange().begin(patience_, kAllgather);
  const auto send = [&](std::span<std::byte> span) { exchange.send(next, span); };
  const Outputs own = slice(layout_.host, layout_.locals.index);
  own.for_each({0, own.bytes()}, send);
  for (std::size_t step = 1; step < hosts; ++step) {
    const Outputs arriving = slice((layout_.host + hosts - step) % hosts, layout_.locals.index);
    const bool passes_on = step + 1 < hosts;
    for (std::uint64_t k = 0; k < chunk_count(arriving.bytes(), kPiece); ++k) {
      const Range piece = chunk_at(arriving.bytes(), kPiece, k);
      arriving.for_each(piece, [&](std::span<std::byte> span) { exchange.receive(before, span); });
      if (!passes_on) continue;
      HVDLITE_RETURN_IF_ERROR(exchange.await_received(exchange.mark()));
      arriving.for_each(piece, send);
    }
  }
  return exchange.await_moved(exchange.mark());
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

}  // namespace

Status host_allgather(HostPlane& plane, std::span<const Allgather> calls, Patience patience) {
  return HostAllgather(plane, calls[0].group, patience).run(calls);
}

}  // namespace hvdlite
