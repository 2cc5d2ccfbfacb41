#include "host/host_backend.h"

#include <algorithm>
#include <cstring>

namespace hvdlite {
namespace {

constexpr const char* kBarrier = "a barrier";

}  // namespace

HostBackend::HostBackend(Fabric& fabric, const Config& config)
    : fabric_(fabric), tunables_(tunables_of(config)), staging_(fabric) {}

const HostBackend::Layout& HostBackend::layout_of(const Group& group) {
  Layout& layout = layouts_[group.id];
  if (!layout.hosts.empty() && layout.locals.group.generation == group.generation) return layout;
  layout = {};
  const Topology& topology = fabric_.topology;
  std::map<int, std::size_t> index;  // of a topology's host in layout.hosts
  for (const int rank : group.ranks) {
    const auto [found, first] = index.try_emplace(topology.host_of[rank], layout.hosts.size());
    if (first) layout.hosts.emplace_back();
    layout.hosts[found->second].push_back(rank);
  }
  layout.host = static_cast<int>(index.at(topology.host_of[topology.rank]));
  layout.locals.group = {group.id, layout.hosts[layout.host], group.lane, group.generation};
  layout.locals.index = layout.locals.group.index_of(topology.rank);
  layout.drivers = static_cast<int>(group.ranks.size());
  for (const auto& ranks : layout.hosts) {
    layout.drivers = std::min(layout.drivers, static_cast<int>(ranks.size()));
  }
  for (const auto& ranks : layout.hosts) {
    layout.counts.push_back(static_cast<int>(ranks.size()));
    if (layout.driver()) layout.peers.push_back(ranks[layout.locals.index]);
  }
  return layout;
}

std::uint64_t HostBackend::chunk_bytes(const Layout& layout) const {
  const std::int64_t wanted = layout.spans_hosts() ? tunables_.tcp_chunk : tunables_.shm_chunk;
  return std::clamp<std::uint64_t>(static_cast<std::uint64_t>(std::max<std::int64_t>(wanted, 0)),
                                   kCutBytes, staging_.slot_bytes());
}

Result<std::uint64_t> HostBackend::share_bytes(const Layout& layout, std::size_t parts) const {
  const std::uint64_t room = std::max(chunk_bytes(layout), parts * kCutBytes);
  if (room > staging_.slot_bytes()) {
    return Status(StatusCode::kInternal,
                  "staging slots of " + std::to_string(staging_.slot_bytes()) +
                      " bytes are too small for " + std::to_string(parts) +
                      " parts; raise HVDLITE_SHM_CHUNK or HVDLITE_TCP_CHUNK");
  }
  return room / parts / kCutBytes * kCutBytes;
}

Status HostBackend::allreduce(const Allreduce& call, Patience patience) {
  const auto& [group, types, op, pieces] = call;
  if (op == ReduceOp::kAdasum) return adasum_.run(*this, fabric_.topology.rank, call, patience);
  pieces_.assign(pieces, types.memory);
  if (pieces_.elements() == 0) return Status();
  const Layout& layout = layout_of(group);
  const Reduction reduction{
      layout,  types, op, op == ReduceOp::kAverage ? group.divisor() : 1, size_of(types.wire),
      patience};
  const std::uint64_t bytes = pieces_.elements() * reduction.element_bytes;
  const bool small =
      bytes <= static_cast<std::uint64_t>(std::max<std::int64_t>(tunables_.shm_small, 0)) &&
      bytes <= staging_.slot_bytes();
  return small && !layout.spans_hosts() ? reduce_small(reduction) : reduce_chunks(reduction);
}

Status HostBackend::reduce_small(const Reduction& reduction) {
  const Layout& layout = reduction.layout;
  const Range all{0, pieces_.elements()};
  const Step step = staging_.begin(layout.locals, reduction.patience, kAllreduce);
  HVDLITE_RETURN_IF_ERROR(staging_.reuse(step));
  copy_in(reduction, all, staging_.own_slot(step));
  staging_.publish(step);
  HVDLITE_RETURN_IF_ERROR(staging_.await_published(step));
  sources_.clear();
  for (std::size_t i = 0; i < layout.locals.group.ranks.size(); ++i) {
    sources_.push_back(staging_.slot_of(step, static_cast<int>(i)));
  }
  finish(reduction, all, nullptr);
  staging_.done(step);
  return Status();
}

Status HostBackend::reduce_chunks(const Reduction& reduction) {
  const std::uint64_t per_chunk = chunk_bytes(reduction.layout) / reduction.element_bytes;
  const std::uint64_t chunks = chunk_count(pieces_.elements(), per_chunk);
  const auto range = [&](std::uint64_t k) { return chunk_at(pieces_.elements(), per_chunk, k); };
  return pipeline(
      reduction.layout, reduction.patience, kAllreduce, chunks,
      [&](const Step& step, std::uint64_t k) { return publish_chunk(reduction, step, range(k)); },
      [&](const Step& step, std::uint64_t k) -> Status {
        HVDLITE_RETURN_IF_ERROR(reduce_slice(reduction, step, range(k)));
        return take_results(reduction, step, range(k));
      });
}

Status HostBackend::publish_chunk(const Reduction& reduction, const Step& step, Range chunk) {
  HVDLITE_RETURN_IF_ERROR(staging_.reuse(step));
  const Layout& layout = reduction.layout;
  std::byte* slot = staging_.own_slot(step);
  const auto copy = [&](Range range) {
    copy_in(reduction, range, slot + (range.begin - chunk.begin) * reduction.element_bytes);
  };
  if (!reads_own_slice_in_place(reduction)) {
    copy(chunk);
  } else {
    const Range own = part_of(chunk, reduction.element_bytes, layout.drivers, layout.locals.index);
    copy({chunk.begin, own.begin});
    copy({own.end, chunk.end});
  }
  staging_.publish(step);
  return Status();
}

Status HostBackend::reduce_slice(const Reduction& reduction, const Step& step, Range chunk) {
  const Layout& layout = reduction.layout;
  if (!layout.driver()) return Status();
  const Range slice = part_of(chunk, reduction.element_bytes, layout.drivers, layout.locals.index);
  const std::uint64_t offset = (slice.begin - chunk.begin) * reduction.element_bytes;
  HVDLITE_RETURN_IF_ERROR(staging_.await_published(step));
  std::byte* own = staging_.own_slot(step) + offset;
  sources_.clear();
  for (std::size_t i = 0; i < layout.locals.group.ranks.size(); ++i) {
    sources_.push_back(staging_.slot_of(step, static_cast<int>(i)) + offset);
  }
  // Nobody else reads this part of this rank's slot before the result lies in it.
  if (reads_own_slice_in_place(reduction)) sources_[layout.locals.index] = nullptr;
  if (layout.spans_hosts()) {
    hvdlite::reduce(reduction.types.wire, reduction.op_within_host(), sources_, own, slice.count(),
                    reduction.end_within_host());
    HVDLITE_RETURN_IF_ERROR(reduce_across_hosts(reduction, step, chunk, slice));
  } else {
    finish(reduction, slice, own);
  }
  staging_.reduced(step);
  return Status();
}

Status HostBackend::reduce_across_hosts(const Reduction& reduction, const Step& step, Range chunk,
                                        Range slice) {
  const Layout& layout = reduction.layout;
  const std::size_t hosts = layout.hosts.size();
  const auto part = [&](std::size_t h) {
    return part_of(slice, reduction.element_bytes, hosts, h);
  };
  const auto own_part = part(static_cast<std::size_t>(layout.host));
  std::byte* slot = staging_.own_slot(step);
  const auto bytes_at = [&](Range range) -> std::span<std::byte> {
    return {slot + (range.begin - chunk.begin) * reduction.element_bytes,
            range.count() * reduction.element_bytes};
  };
  const std::uint64_t part_bytes = bytes_at(own_part).size();
  if (received_.size() < hosts * part_bytes) received_.resize(hosts * part_bytes);

  transfers_.clear();
  sources_.clear();
  for (std::size_t h = 0; h < hosts; ++h) {
    std::byte* incoming = received_.data() + h * part_bytes;
    const bool own = h == static_cast<std::size_t>(layout.host);
    sources_.push_back(own ? bytes_at(own_part).data() : incoming);
    if (!own) transfers_.push_back({layout.peers[h], bytes_at(part(h)), {incoming, part_bytes}});
  }
  HVDLITE_RETURN_IF_ERROR(exchange_between_hosts(reduction.patience, kAllreduce));
  finish(reduction, own_part, bytes_at(own_part).data());

  transfers_.clear();
  for (std::size_t h = 0; h < hosts; ++h) {
    if (h == static_cast<std::size_t>(layout.host)) continue;
    transfers_.push_back({layout.peers[h], bytes_at(own_part), bytes_at(part(h))});
  }
  HVDLITE_RETURN_IF_ERROR(exchange_between_hosts(reduction.patience, kAllreduce));
  copy_out(reduction, slice, bytes_at(slice).data());
  return Status();
}

Status HostBackend::take_results(const Reduction& reduction, const Step& step, Range chunk) {
  const Layout& layout = reduction.layout;
  HVDLITE_RETURN_IF_ERROR(staging_.await_reduced(step, layout.drivers));
  for (int driver = 0; driver < layout.drivers; ++driver) {
    if (driver == layout.locals.index) continue;  // taken when it was reduced
    const Range slice = part_of(chunk, reduction.element_bytes, layout.drivers, driver);
    copy_out(
        reduction, slice,
        staging_.slot_of(step, driver) + (slice.begin - chunk.begin) * reduction.element_bytes);
  }
  staging_.done(step);
  return Status();
}

Status HostBackend::exchange_between_hosts(Patience patience, const char* operation) {
  if (transfers_.empty()) return Status();
  const TraceSpan traced = part("exchange");
  return exchange(fabric_.data, *fabric_.waiter, transfers_, patience, operation);
}

void HostBackend::copy_in(const Reduction& reduction, Range range, std::byte* to) const {
  if (range.count() == 0) return;
  const TraceSpan traced = part("pack");
  pieces_.for_each(range, [&](const Piece& piece, const std::byte* input, std::byte*,
                              std::uint64_t at, std::uint64_t count) {
    scale_copy(reduction.types, input, to + at * reduction.element_bytes, count, piece.prescale);
  });
}

void HostBackend::copy_out(const Reduction& reduction, Range range, const std::byte* from) const {
  const TraceSpan traced = part("unpack");
  const ElementTypes back{reduction.types.wire, reduction.types.memory};
  pieces_.for_each(range, [&](const Piece& piece, const std::byte*, std::byte* output,
                              std::uint64_t at, std::uint64_t count) {
    const double factor = back.cast() ? piece.postscale : 1.0;  // otherwise finish() has scaled
    scale_copy(back, from + at * reduction.element_bytes, output, count, factor);
  });
}

void HostBackend::finish(const Reduction& reduction, Range range, std::byte* to) {
  if (reduction.types.cast()) return finish_cast(reduction, range, to);
  const TraceSpan traced = part("reduce");
  pieces_.for_each(range, [&](const Piece& piece, const std::byte* input, std::byte* output,
                              std::uint64_t at, std::uint64_t count) {
    const std::uint64_t offset = at * reduction.element_bytes;
    shifted_.clear();
    for (const void* source : sources_) {
      shifted_.push_back(source == nullptr ? input
                                           : static_cast<const std::byte*>(source) + offset);
    }
    hvdlite::reduce(reduction.types.wire, reduction.op, shifted_, output, count,
                    reduction.end(piece.postscale));
    // Between hosts the slice is taken as a whole, once all of its parts are there.
    if (to != nullptr) std::memcpy(to + offset, output, count * reduction.element_bytes);
  });
}

void HostBackend::finish_cast(const Reduction& reduction, Range range, std::byte* to) {
  const std::size_t bytes = range.count() * reduction.element_bytes;
  if (to == nullptr && narrow_.size() < bytes) narrow_.resize(bytes);
  std::byte* result = to == nullptr ? narrow_.data() : to;
  {
    const TraceSpan traced = part("reduce");
    hvdlite::reduce(reduction.types.wire, reduction.op, sources_, result, range.count(),
                    reduction.end(1.0));
  }
  // Between hosts the slice is taken as a whole, as in finish().
  if (!reduction.layout.spans_hosts()) copy_out(reduction, range, result);
}

Status HostBackend::barrier(const Group& group, Patience patience) {
  const Layout& layout = layout_of(group);
  const Step step = staging_.begin(layout.locals, patience, kBarrier);
  staging_.publish(step);
  HVDLITE_RETURN_IF_ERROR(staging_.await_published(step));
  if (layout.spans_hosts() && layout.locals.index == 0) {
    std::byte sent{};
    std::vector<std::byte> received(layout.hosts.size());
    transfers_.clear();
    for (std::size_t h = 0; h < layout.hosts.size(); ++h) {
      if (h == static_cast<std::size_t>(layout.host)) continue;
      transfers_.push_back({layout.hosts[h][0], {&sent, 1}, {&received[h], 1}});
    }
    HVDLITE_RETURN_IF_ERROR(exchange_between_hosts(patience, kBarrier));
  }
  staging_.reduced(step);
  HVDLITE_RETURN_IF_ERROR(staging_.await_reduced(step, 1));
  staging_.done(step);
  return Status();
}

}  // namespace hvdlite
