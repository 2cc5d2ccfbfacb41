// HostBackend's reduce-scatter.
#include <algorithm>

#include "host/host_backend.h"

namespace hvdlite {

Status HostBackend::reducescatter(const Reducescatter& call, Patience patience) {
  const auto& [group, dtype, op, piece, counts] = call;
  const std::uint64_t longest = *std::max_element(counts.begin(), counts.end());
  if (longest == 0) return Status();
  const Layout& layout = layout_of(group);
  const Reduction reduction{
      layout, dtype, op, op == ReduceOp::kAverage ? group.divisor() : 1, size_of(dtype), patience};
  const Result<std::uint64_t> bytes = share_bytes(layout, counts.size());
  if (!bytes.ok()) return bytes.status();
  const Scatter scatter =
      make_scatter(reduction, group, piece, counts, bytes.value() / reduction.element_bytes);
  return pipeline(
      layout, patience, kReducescatter, chunk_count(longest, scatter.share),
      [&](const Step& step, std::uint64_t k) { return publish_parts(scatter, step, k); },
      [&](const Step& step, std::uint64_t k) -> Status {
        HVDLITE_RETURN_IF_ERROR(reduce_parts(scatter, step, k));
        return layout.spans_hosts() ? end_part(scatter, k) : Status();
      });
}

HostBackend::Scatter HostBackend::make_scatter(const Reduction& reduction, const Group& group,
                                               const Piece& piece,
                                               std::span<const std::uint64_t> counts,
                                               std::uint64_t share) const {
  const Layout& layout = reduction.layout;
  Scatter scatter{reduction, piece, counts, share, {}, {}};
  std::uint64_t at = 0;
  for (const std::uint64_t count : counts) {
    scatter.begins.push_back(at);
    at += count;
  }
  const auto position = [&](int rank) { return static_cast<std::size_t>(group.index_of(rank)); };
  const int self = fabric_.topology.rank;
  scatter.served.push_back({position(self), self, true});
  const std::size_t locals = layout.locals.group.ranks.size();
  for (std::size_t h = 0; h < layout.hosts.size(); ++h) {
    if (h == static_cast<std::size_t>(layout.host)) continue;
    // Locals share the members of another host between them, as add_incoming's caller knows.
    for (auto i = static_cast<std::size_t>(layout.locals.index); i < layout.hosts[h].size();
         i += locals) {
      scatter.served.push_back({position(layout.hosts[h][i]), layout.hosts[h][i], false});
    }
  }
  return scatter;
}

Status HostBackend::publish_parts(const Scatter& scatter, const Step& step, std::uint64_t k) {
  HVDLITE_RETURN_IF_ERROR(staging_.reuse(step));
  const TraceSpan traced = part("pack");
  const std::uint64_t element_bytes = scatter.reduction.element_bytes;
  const auto* input = static_cast<const std::byte*>(scatter.piece.input);
  for (std::size_t member = 0; member < scatter.counts.size(); ++member) {
    const Range part = scatter.part(member, k);
    if (part.count() == 0) continue;
    scale_copy(scatter.reduction.types.wire,
               input + (scatter.begins[member] + part.begin) * element_bytes,
               staging_.own_slot(step) + scatter.slot_offset(member), part.count(),
               scatter.piece.prescale);
  }
  staging_.publish(step);
  return Status();
}

Status HostBackend::reduce_parts(const Scatter& scatter, const Step& step, std::uint64_t k) {
  const Reduction& reduction = scatter.reduction;
  const Layout& layout = reduction.layout;
  const std::uint64_t share_bytes = scatter.slot_offset(1);
  const std::size_t needed = layout.spans_hosts() ? scatter.served.size() * share_bytes : 0;
  if (partials_.size() < needed) partials_.resize(needed);
  HVDLITE_RETURN_IF_ERROR(staging_.await_published(step));
  const TraceSpan traced = part("reduce");
  transfers_.clear();
  for (std::size_t i = 0; i < scatter.served.size(); ++i) {
    const Scatter::Served& served = scatter.served[i];
    const Range part = scatter.part(served.member, k);
    if (part.count() == 0) continue;
    sources_.clear();
    for (std::size_t l = 0; l < layout.locals.group.ranks.size(); ++l) {
      sources_.push_back(staging_.slot_of(step, static_cast<int>(l)) +
                         scatter.slot_offset(served.member));
    }
    if (!layout.spans_hosts()) {
      auto* output = static_cast<std::byte*>(scatter.piece.output);
      hvdlite::reduce(reduction.types.wire, reduction.op, sources_,
                      output + part.begin * reduction.element_bytes, part.count(),
                      reduction.end(scatter.piece.postscale));
      continue;
    }
    std::byte* partial = partials_.data() + i * share_bytes;
    hvdlite::reduce(reduction.types.wire, reduction.op_within_host(), sources_, partial,
                    part.count(), reduction.end_within_host());
    if (served.own_host) continue;
    transfers_.push_back({served.rank, {partial, part.count() * reduction.element_bytes}, {}});
  }
  staging_.done(step);
  return Status();
}

Status HostBackend::end_part(const Scatter& scatter, std::uint64_t k) {
  const Reduction& reduction = scatter.reduction;
  const Layout& layout = reduction.layout;
  const std::size_t hosts = layout.hosts.size();
  const Range part = scatter.part(scatter.served[0].member, k);
  const std::uint64_t part_bytes = part.count() * reduction.element_bytes;
  if (received_.size() < hosts * part_bytes) received_.resize(hosts * part_bytes);
  sources_.clear();
  for (std::size_t h = 0; h < hosts && part_bytes > 0; ++h) {
    std::byte* incoming = received_.data() + h * part_bytes;
    const bool own = h == static_cast<std::size_t>(layout.host);
    sources_.push_back(own ? partials_.data() : incoming);
    if (own) continue;
    const auto server = static_cast<std::size_t>(layout.locals.index) % layout.hosts[h].size();
    add_incoming(layout.hosts[h][server], {incoming, part_bytes});
  }
  HVDLITE_RETURN_IF_ERROR(exchange_between_hosts(reduction.patience, kReducescatter));
  if (part_bytes == 0) return Status();
  hvdlite::reduce(
      reduction.types.wire, reduction.op, sources_,
      static_cast<std::byte*>(scatter.piece.output) + part.begin * reduction.element_bytes,
      part.count(), reduction.end(scatter.piece.postscale));
  return Status();
}

void HostBackend::add_incoming(int rank, std::span<std::byte> bytes) {
  // One transfer per rank: it may be served by this rank, too.
  for (Transfer& transfer : transfers_) {
    if (transfer.rank != rank) continue;
    transfer.incoming = bytes;
    return;
  }
  transfers_.push_back({rank, {}, bytes});
}

}  // namespace hvdlite
