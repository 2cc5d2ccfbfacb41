#include "host/allreduce.h"

#include <algorithm>
#include <cstring>

#include "kernels/stream_copy.h"

namespace hvdlite {

Status HostAllreduce::run(const HostLayout& layout, const Allreduce& call, Patience patience) {
  pieces_.assign(call.pieces, call.types.memory);
  if (pieces_.elements() == 0) return Status();
  const ElementTypes types = call.types;
  const bool in_place =
      layout.driver() && !layout.spans_hosts() && !pieces_.prescaled() && !types.cast();
  const HostReduction reduction(layout, call.group, types.wire, call.op);
  const auto any = [&](auto has) {
    return std::any_of(call.pieces.begin(), call.pieces.end(), has);
  };
  const bool saves = any([](const Piece& piece) { return piece.copy != nullptr; });
  const bool packs = layout.spans_hosts() && any([](const Piece& piece) { return piece.packed; });
  const Batch batch{layout,   pieces_, types, reduction, patience, size_of(types.wire),
                    in_place, saves,   packs};
  const std::uint64_t bytes = pieces_.elements() * batch.element_bytes;
  const auto small = std::max<std::int64_t>(plane_.tunables().shm_small, 0);
  const bool one_step = bytes <= static_cast<std::uint64_t>(small) &&
                        bytes <= plane_.staging().buffer_bytes() && !layout.spans_hosts();
  return one_step ? reduce_small(batch) : reduce_chunks(batch);
}

Status HostAllreduce::reduce_small(const Batch& batch) {
  Staging& staging = plane_.staging();
  const Range all{0, batch.pieces.elements()};
  const Staging::Step step = staging.begin(batch.layout.locals, batch.patience, kAllreduce);
  HVDLITE_RETURN_IF_ERROR(staging.reuse(step));
  save_inputs(batch, all);
  copy_in(batch, all, staging.own_buffer(step));
  staging.publish(step);
  HVDLITE_RETURN_IF_ERROR(staging.await_published(step));
  finish(batch, all, staging.buffers(step, 0), nullptr);
  staging.done(step);
  return Status();
}

Status HostAllreduce::reduce_chunks(const Batch& batch) {
  const std::uint64_t elements = batch.pieces.elements();
  const std::uint64_t per_chunk = batch.elements_per_chunk(plane_.chunk_bytes(batch.layout));
  const auto chunk = [&](const Staging::Step& step, std::uint64_t k) {
    return Chunk{batch, step, batch.cut(chunk_at(elements, per_chunk, k))};
  };
  return plane_.pipeline(
      batch.layout, batch.patience, kAllreduce, chunk_count(elements, per_chunk),
      [&](const Staging::Step& step, std::uint64_t k) { return publish(chunk(step, k)); },
      [&](const Staging::Step& step, std::uint64_t k) -> Status {
        const Chunk taken = chunk(step, k);
        HVDLITE_RETURN_IF_ERROR(reduce_slice(taken));
        return take_results(taken);
      });
}

// A chunk of a batch that packs begins before its even begin, by less than a block. Two blocks fit
// into any staging buffer (transport/segment.h).
std::uint64_t HostAllreduce::Batch::elements_per_chunk(std::uint64_t chunk_bytes) const {
  const std::uint64_t even = chunk_bytes / element_bytes;
  return packs ? std::max<std::uint64_t>(even, 2 * kPackedBlock) - kPackedBlock : even;
}

Status HostAllreduce::publish(const Chunk& chunk) {
  const Batch& batch = chunk.batch;
  Staging& staging = plane_.staging();
  HVDLITE_RETURN_IF_ERROR(staging.reuse(chunk.step));
  std::byte* buffer = staging.own_buffer(chunk.step);
  save_inputs(batch, chunk.elements);
  if (!batch.own_slice_in_place) {
    copy_in(batch, chunk.elements, buffer);
  } else {
    const Range own = chunk.slice(batch.layout.locals.index);
    const Range after{own.end, chunk.elements.end};
    copy_in(batch, {chunk.elements.begin, own.begin}, buffer);
    copy_in(batch, after, buffer + chunk.offset(after));
  }
  staging.publish(chunk.step);
  return Status();
}

Status HostAllreduce::reduce_slice(const Chunk& chunk) {
  const Batch& batch = chunk.batch;
  const HostLayout& layout = batch.layout;
  if (!layout.driver()) return Status();
  Staging& staging = plane_.staging();
  const Range slice = chunk.slice(layout.locals.index);
  HVDLITE_RETURN_IF_ERROR(staging.await_published(chunk.step));
  std::vector<const void*> sources = staging.buffers(chunk.step, chunk.offset(slice));
  // Nobody else reads this part of this rank's buffer before the result lies in it.
  std::byte* own = staging.own_buffer(chunk.step) + chunk.offset(slice);
  if (batch.own_slice_in_place) sources[layout.locals.index] = nullptr;
  if (layout.spans_hosts()) {
    batch.reduction.within_host(sources, own, slice.count());
    HVDLITE_RETURN_IF_ERROR(reduce_across_hosts(chunk, slice));
  } else {
    finish(batch, slice, sources, own);
  }
  staging.reduced(chunk.step);
  return Status();
}

Status HostAllreduce::reduce_across_hosts(const Chunk& chunk, Range slice) {
  const Batch& batch = chunk.batch;
  std::byte* lies_at = plane_.staging().own_buffer(chunk.step) + chunk.offset(slice);
  std::vector<Range> parts;
  for (std::size_t h = 0; h < batch.layout.hosts.size(); ++h) {
    parts.push_back(batch.part(slice, batch.layout.hosts.size(), h));
  }
  if (batch.packs) {
    HVDLITE_RETURN_IF_ERROR(packed_.run(batch.layout, batch.pieces, batch.types.memory,
                                        batch.reduction, {parts, lies_at}, batch.patience));
  } else {
    HVDLITE_RETURN_IF_ERROR(exchange_parts(chunk, parts));
  }
  copy_out(batch, slice, lies_at);
  return Status();
}

Status HostAllreduce::exchange_parts(const Chunk& chunk, const std::vector<Range>& parts) {
  const Batch& batch = chunk.batch;
  const HostLayout& layout = batch.layout;
  const std::size_t hosts = layout.hosts.size();
  std::byte* buffer = plane_.staging().own_buffer(chunk.step);
  const auto part = [&](std::size_t h) -> std::span<std::byte> {
    return {buffer + chunk.offset(parts[h]), parts[h].count() * batch.element_bytes};
  };
  const std::span<std::byte> own_part = part(layout.host);
  if (received_.size() < hosts * own_part.size()) received_.resize(hosts * own_part.size());

  std::vector<Transfer> scatter;  // part h to host h
  std::vector<Transfer> gather;   // the finished parts to all
  std::vector<const void*> sources;
  for (std::size_t h = 0; h < hosts; ++h) {
    std::byte* incoming = received_.data() + h * own_part.size();
    sources.push_back(h == layout.host ? own_part.data() : incoming);
    if (h == layout.host) continue;
    scatter.push_back({layout.peers[h], part(h), {incoming, own_part.size()}});
    gather.push_back({layout.peers[h], own_part, part(h)});
  }
  HVDLITE_RETURN_IF_ERROR(plane_.exchange_with_ranks(scatter, batch.patience, kAllreduce));
  finish(batch, parts[layout.host], sources, own_part.data());
  return plane_.exchange_with_ranks(gather, batch.patience, kAllreduce);
}

void HostAllreduce::finish(const Batch& batch, Range range, Sources sources, std::byte* to) {
  if (batch.types.cast()) return finish_cast(batch, range, sources, to);
  const TraceSpan traced = plane_.part("reduce");
  std::vector<const void*> at_piece(sources.size());
  batch.pieces.for_each(range, [&](const Piece& piece, const std::byte* input, std::byte* output,
                                   std::uint64_t at, std::uint64_t count) {
    const std::uint64_t offset = at * batch.element_bytes;
    std::transform(sources.begin(), sources.end(), at_piece.begin(), [&](const void* source) {
      return source == nullptr ? input : static_cast<const std::byte*>(source) + offset;
    });
    batch.reduction.finish(at_piece, output, count, piece.postscale);
    if (to != nullptr) std::memcpy(to + offset, output, count * batch.element_bytes);
  });
}

void HostAllreduce::finish_cast(const Batch& batch, Range range, Sources sources, std::byte* to) {
  const std::size_t bytes = range.count() * batch.element_bytes;
  if (to == nullptr && narrow_.size() < bytes) narrow_.resize(bytes);
  std::byte* result = to == nullptr ? narrow_.data() : to;
  {
    const TraceSpan traced = plane_.part("reduce");
    batch.reduction.finish(sources, result, range.count(), 1.0);
  }
  // Between hosts the slice is taken as a whole, once all of its parts are there.
  if (!batch.layout.spans_hosts()) copy_out(batch, range, result);
}

Status HostAllreduce::take_results(const Chunk& chunk) {
  const HostLayout& layout = chunk.batch.layout;
  Staging& staging = plane_.staging();
  HVDLITE_RETURN_IF_ERROR(staging.await_reduced(chunk.step, layout.drivers));
  for (int driver = 0; driver < layout.drivers; ++driver) {
    if (driver == layout.locals.index) continue;  // taken when it was reduced
    const Range slice = chunk.slice(driver);
    copy_out(chunk.batch, slice, staging.buffer_of(chunk.step, driver) + chunk.offset(slice));
  }
  staging.done(chunk.step);
  return Status();
}

void HostAllreduce::save_inputs(const Batch& batch, Range range) const {
  if (!batch.saves) return;
  const TraceSpan traced = plane_.part("keep");
  const std::uint64_t element_bytes = size_of(batch.types.memory);
  batch.pieces.for_each(range, [&](const Piece& piece, const std::byte* input, std::byte*,
                                   std::uint64_t, std::uint64_t count) {
    if (piece.copy == nullptr) return;
    const std::uint64_t bytes = count * element_bytes;
    stream_copy(input, piece.copy->to + piece.copy->bytes, bytes);
    piece.copy->bytes += bytes;
  });
}

void HostAllreduce::copy_in(const Batch& batch, Range range, std::byte* to) const {
  if (range.count() == 0) return;
  const TraceSpan traced = plane_.part("pack");
  batch.pieces.for_each(range, [&](const Piece& piece, const std::byte* input, std::byte*,
                                   std::uint64_t at, std::uint64_t count) {
    scale_copy(batch.types, input, to + at * batch.element_bytes, count, piece.prescale);
  });
}

void HostAllreduce::copy_out(const Batch& batch, Range range, const std::byte* from) const {
  const TraceSpan traced = plane_.part("unpack");
  const ElementTypes back{batch.types.wire, batch.types.memory};
  batch.pieces.for_each(range, [&](const Piece& piece, const std::byte*, std::byte* output,
                                   std::uint64_t at, std::uint64_t count) {
    const double factor = back.cast() ? piece.postscale : 1.0;  // otherwise finish() has scaled
    scale_copy(back, from + at * batch.element_bytes, output, count, factor);
  });
}

}  // namespace hvdlite
