#include "host/reducescatter.h"

#include <algorithm>

namespace hvdlite {
namespace {

// One transfer per rank: this rank may serve it, too.
void add_incoming(std::vector<Transfer>& transfers, int rank, std::span<std::byte> bytes) {
  for (Transfer& transfer : transfers) {
    if (transfer.rank != rank) continue;
    transfer.incoming = bytes;
    return;
  }
  transfers.push_back({rank, {}, bytes});
}

}  // namespace

Status HostReducescatter::run(const Reducescatter& call, Patience patience) {
  const std::uint64_t longest = *std::max_element(call.counts.begin(), call.counts.end());
  if (longest == 0) return Status();
  const HostLayout& layout = plane_.layout_of(call.group);
  HVDLITE_ASSIGN_OR_RETURN(std::uint64_t bytes, plane_.share_bytes(layout, call.counts.size()));
  const Scatter scatter = set_up(layout, call, patience, bytes / size_of(call.dtype));
  return plane_.pipeline(
      layout, patience, kReducescatter, chunk_count(longest, scatter.share),
      [&](const Staging::Step& step, std::uint64_t k) { return publish(scatter, step, k); },
      [&](const Staging::Step& step, std::uint64_t k) -> Status {
        if (!layout.spans_hosts()) return reduce_own_part(scatter, step, k);
        HVDLITE_ASSIGN_OR_RETURN(std::vector<Transfer> sums, sum_within_host(scatter, step, k));
        return reduce_across_hosts(scatter, k, std::move(sums));
      });
}

HostReducescatter::Scatter HostReducescatter::set_up(const HostLayout& layout,
                                                     const Reducescatter& call, Patience patience,
                                                     std::uint64_t share) {
  const auto position = [&](int rank) {
    return static_cast<std::size_t>(call.group.index_of(rank));
  };
  Scatter scatter{layout,
                  call,
                  {layout, call.group, call.dtype, call.op},
                  patience,
                  position(plane_.rank()),
                  share,
                  {},
                  {}};
  std::uint64_t at = 0;
  for (const std::uint64_t count : call.counts) {
    scatter.begins.push_back(at);
    at += count;
  }
  if (!layout.spans_hosts()) return scatter;
  const std::size_t locals = layout.locals.group.ranks.size();
  for (std::size_t h = 0; h < layout.hosts.size(); ++h) {
    if (h == layout.host) continue;
    // The locals divide the members of another host among them, as reduce_across_hosts() knows.
    for (auto i = static_cast<std::size_t>(layout.locals.index); i < layout.hosts[h].size();
         i += locals) {
      scatter.served.push_back({position(layout.hosts[h][i]), layout.hosts[h][i]});
    }
  }
  const std::size_t sums = (1 + scatter.served.size()) * scatter.share_bytes();
  const std::size_t needed = sums + layout.hosts.size() * scatter.share_bytes();
  if (buffer_.size() < needed) buffer_.resize(needed);
  scatter.sums = buffer_.data();
  scatter.received = buffer_.data() + sums;
  return scatter;
}

Status HostReducescatter::publish(const Scatter& scatter, const Staging::Step& step,
                                  std::uint64_t k) {
  Staging& staging = plane_.staging();
  HVDLITE_RETURN_IF_ERROR(staging.reuse(step));
  const TraceSpan traced = plane_.part("pack");
  const Piece& piece = scatter.call.piece;
  const auto* input = static_cast<const std::byte*>(piece.input);
  for (std::size_t member = 0; member < scatter.call.counts.size(); ++member) {
    const Range part = scatter.part(member, k);
    if (part.count() == 0) continue;
    scale_copy(
        scatter.call.dtype, input + (scatter.begins[member] + part.begin) * scatter.element_bytes(),
        staging.own_buffer(step) + scatter.buffer_offset(member), part.count(), piece.prescale);
  }
  staging.publish(step);
  return Status();
}

Status HostReducescatter::reduce_own_part(const Scatter& scatter, const Staging::Step& step,
                                          std::uint64_t k) {
  Staging& staging = plane_.staging();
  HVDLITE_RETURN_IF_ERROR(staging.await_published(step));
  const TraceSpan traced = plane_.part("reduce");
  const Range part = scatter.part(scatter.self, k);
  if (part.count() > 0) {
    scatter.reduction.finish(staging.buffers(step, scatter.buffer_offset(scatter.self)),
                             scatter.output(part), part.count(), scatter.call.piece.postscale);
  }
  staging.done(step);
  return Status();
}

Result<std::vector<Transfer>> HostReducescatter::sum_within_host(const Scatter& scatter,
                                                                 const Staging::Step& step,
                                                                 std::uint64_t k) {
  Staging& staging = plane_.staging();
  HVDLITE_RETURN_IF_ERROR(staging.await_published(step));
  const TraceSpan traced = plane_.part("reduce");
  const auto sum = [&](std::size_t member, std::byte* to) -> std::span<std::byte> {
    const Range part = scatter.part(member, k);
    if (part.count() == 0) return {};
    scatter.reduction.within_host(staging.buffers(step, scatter.buffer_offset(member)), to,
                                  part.count());
    return {to, part.count() * scatter.element_bytes()};
  };
  std::byte* to = scatter.sums;
  sum(scatter.self, to);
  std::vector<Transfer> transfers;
  for (const Served& served : scatter.served) {
    to += scatter.share_bytes();
    const std::span<std::byte> bytes = sum(served.member, to);
    if (!bytes.empty()) transfers.push_back({served.rank, bytes, {}});
  }
  staging.done(step);
  return transfers;
}

Status HostReducescatter::reduce_across_hosts(const Scatter& scatter, std::uint64_t k,
                                              std::vector<Transfer> transfers) {
  const HostLayout& layout = scatter.layout;
  const Range part = scatter.part(scatter.self, k);
  const std::size_t part_bytes = part.count() * scatter.element_bytes();
  std::vector<const void*> sources;
  for (std::size_t h = 0; h < layout.hosts.size() && part_bytes > 0; ++h) {
    std::byte* incoming = scatter.received + h * scatter.share_bytes();
    sources.push_back(h == layout.host ? scatter.sums : incoming);
    if (h == layout.host) continue;
    const auto server = static_cast<std::size_t>(layout.locals.index) % layout.hosts[h].size();
    add_incoming(transfers, layout.hosts[h][server], {incoming, part_bytes});
  }
  HVDLITE_RETURN_IF_ERROR(plane_.exchange().transfer(transfers, scatter.patience, kReducescatter));
  if (part_bytes == 0) return Status();
  scatter.reduction.finish(sources, scatter.output(part), part.count(),
                           scatter.call.piece.postscale);
  return Status();
}

}  // namespace hvdlite
