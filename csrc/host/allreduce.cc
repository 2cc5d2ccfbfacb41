#include "host/allreduce.h"

#include <algorithm>

namespace hvdlite {
namespace {

// Pieces that are scattered before the first of them is reduced. The network carries them
// meanwhile, so they make up for the delay of a link.
constexpr std::uint64_t kAhead = 4;
// A piece's part for one host is not cut below this: system calls would cost more than they hide.
constexpr std::uint64_t kLeastPart = 128 << 10;  // bytes
// Chunks of a batch that are staged in any case: the second is published before it is known where
// the tensors of all ranks lie.
constexpr std::uint64_t kStaged = 2;

}  // namespace

Status HostAllreduce::run(const HostLayout& layout, const Allreduce& call, Patience patience) {
  pieces_.assign(call.pieces, call.types.memory);
  if (pieces_.elements() == 0) return Status();
  const ElementTypes types = call.types;
  const bool in_place =
      layout.driver() && !layout.spans_hosts() && !pieces_.prescaled() && !types.cast();
  const HostReduction reduction(layout, call.group, types.wire, call.op);
  const bool saves = std::any_of(call.pieces.begin(), call.pieces.end(),
                                 [](const Piece& piece) { return piece.copy != nullptr; });
  const Batch batch{plane_,   layout, pieces_, types, reduction, patience, size_of(types.wire),
                    in_place, saves};
  if (layout.spans_hosts()) {
    const bool alone = layout.hosts.size() == call.group.ranks.size();
    return alone ? reduce_crossing_pieces(batch) : reduce_crossing_chunks(batch);
  }
  const std::uint64_t bytes = pieces_.elements() * batch.element_bytes;
  const auto small = std::max<std::int64_t>(plane_.tunables().shm_small, 0);
  const bool one_step =
      bytes <= static_cast<std::uint64_t>(small) && bytes <= plane_.staging().buffer_bytes();
  return one_step ? reduce_small(batch) : reduce_chunks(batch);
}

Status HostAllreduce::reduce_small(const Batch& batch) {
  Staging& staging = plane_.staging();
  const Range all{0, batch.pieces.elements()};
  const Staging::Step step = staging.begin(batch.layout.locals, batch.patience, kAllreduce);
  HVDLITE_RETURN_IF_ERROR(staging.reuse(step));
  batch.save_inputs(all);
  batch.copy_in(all, staging.own_buffer(step));
  staging.publish(step);
  HVDLITE_RETURN_IF_ERROR(staging.await_published(step));
  const std::size_t bytes = batch.types.cast() ? all.count() * batch.element_bytes : 0;
  if (narrow_.size() < bytes) narrow_.resize(bytes);
  batch.finish(all, staging.buffers(step, 0), bytes > 0 ? narrow_.data() : nullptr);
  staging.done(step);
  return Status();
}

Status HostAllreduce::reduce_chunks(const Batch& batch) {
  const std::uint64_t elements = batch.pieces.elements();
  const std::uint64_t per_chunk = plane_.chunk_bytes(batch.layout) / batch.element_bytes;
  const auto chunk = [&](const Staging::Step& step, std::uint64_t k) {
    return Chunk{batch, step, chunk_at(elements, per_chunk, k)};
  };
  const std::uint64_t count = chunk_count(elements, per_chunk);
  std::uint64_t staged = count;
  HVDLITE_RETURN_IF_ERROR(plane_.pipeline(
      batch.layout, batch.patience, kAllreduce, staged,
      [&](const Staging::Step& step, std::uint64_t k) {
        return publish(chunk(step, k), /*shows=*/k == 0 && count > kStaged);
      },
      [&](const Staging::Step& step, std::uint64_t k) -> Status {
        const Chunk taken = chunk(step, k);
        HVDLITE_RETURN_IF_ERROR(reduce_slice(taken));
        if (k == 0 && count > kStaged && gradients_.found(batch, step)) staged = kStaged;
        return take_results(taken);
      }));
  if (staged == count) return Status();
  return gradients_.reduce(batch, {kStaged * per_chunk, elements});
}

std::uint64_t HostAllreduce::piece_bytes(std::uint64_t bytes, std::size_t hosts) const {
  const auto window =
      static_cast<std::uint64_t>(std::max<std::int64_t>(plane_.tunables().tcp_chunk, kCutBytes));
  const std::uint64_t least = std::min(window, hosts * kLeastPart);
  return std::clamp(bytes / kAhead, least, std::max(least, window / kAhead));
}

Status HostAllreduce::reduce_crossing_pieces(const Batch& batch) {
  const std::uint64_t elements = batch.pieces.elements();
  const std::uint64_t per_piece = std::max<std::uint64_t>(
      1,
      piece_bytes(elements * batch.element_bytes, batch.layout.hosts.size()) / batch.element_bytes);
  const std::uint64_t count = chunk_count(elements, per_piece);
  InterHostExchange inter_host(plane_, plane_.begin_exchange(batch.patience, kAllreduce), batch);
  std::vector<InterHostExchange::Slot>& slots = slots_[0];
  slots.resize(std::max<std::size_t>(slots.size(), 2 * kAhead));
  const auto slot = [&](std::uint64_t k) -> InterHostExchange::Slot& {
    return slots[k % (2 * kAhead)];
  };
  for (std::uint64_t k = 0; k < count + 2 * kAhead; ++k) {
    if (k >= 2 * kAhead && k - 2 * kAhead < count) {
      HVDLITE_RETURN_IF_ERROR(inter_host.take(slot(k)));
    }
    if (k < count) {
      InterHostExchange::Slot& next = slot(k);
      next.range = chunk_at(elements, per_piece, k);
      batch.save_inputs(next.range);
      next.lies_at = nullptr;
      if (!InterHostExchange::travels_from_tensors(batch, next.range)) {
        const std::size_t bytes = next.range.count() * batch.element_bytes;
        if (next.buffer.size() < bytes) next.buffer.resize(bytes);
        next.lies_at = next.buffer.data();
        batch.copy_in(next.range, next.lies_at);
      }
      inter_host.scatter(next, count == 1);
    }
    if (k >= kAhead && k - kAhead < count) {
      HVDLITE_RETURN_IF_ERROR(inter_host.reduce(slot(k - kAhead)));
    }
  }
  return Status();
}

Status HostAllreduce::reduce_crossing_chunks(const Batch& batch) {
  const HostLayout& layout = batch.layout;
  const std::uint64_t elements = batch.pieces.elements();
  const std::uint64_t per_chunk = plane_.chunk_bytes(layout) / batch.element_bytes;
  const std::uint64_t count = chunk_count(elements, per_chunk);
  InterHostExchange inter_host(plane_, plane_.begin_exchange(batch.patience, kAllreduce), batch);
  Staging::Step steps[2];  // This chunk and the next one have one each.
  const auto chunk = [&](std::uint64_t k) {
    return Chunk{batch, steps[k % 2], chunk_at(elements, per_chunk, k)};
  };
  const auto begin = [&](std::uint64_t k) -> Status {
    steps[k % 2] = plane_.staging().begin(layout.locals, batch.patience, kAllreduce);
    HVDLITE_RETURN_IF_ERROR(publish(chunk(k)));
    return scatter_slice(chunk(k), count == 1, inter_host, slots_[k % 2]);
  };
  HVDLITE_RETURN_IF_ERROR(begin(0));
  for (std::uint64_t k = 0; k < count; ++k) {
    if (k + 1 < count) HVDLITE_RETURN_IF_ERROR(begin(k + 1));
    HVDLITE_RETURN_IF_ERROR(gather_slice(chunk(k), inter_host, slots_[k % 2]));
    HVDLITE_RETURN_IF_ERROR(take_results(chunk(k)));
  }
  return Status();
}

Status HostAllreduce::publish(const Chunk& chunk, bool shows) {
  const Batch& batch = chunk.batch;
  Staging& staging = plane_.staging();
  HVDLITE_RETURN_IF_ERROR(staging.reuse(chunk.step));
  if (shows) gradients_.show(batch, chunk.step);
  std::byte* buffer = staging.own_buffer(chunk.step);
  batch.save_inputs(chunk.elements);
  if (!batch.own_slice_in_place) {
    batch.copy_in(chunk.elements, buffer);
  } else {
    const Range own = chunk.slice(batch.layout.locals.index);
    const Range after{own.end, chunk.elements.end};
    batch.copy_in({chunk.elements.begin, own.begin}, buffer);
    batch.copy_in(after, buffer + chunk.offset(after));
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
  batch.finish(slice, sources, own);
  staging.reduced(chunk.step);
  return Status();
}

Status HostAllreduce::scatter_slice(const Chunk& chunk, bool alone, InterHostExchange& inter_host,
                                    std::vector<InterHostExchange::Slot>& slots) {
  const Batch& batch = chunk.batch;
  const HostLayout& layout = batch.layout;
  if (!layout.driver()) return Status();
  Staging& staging = plane_.staging();
  HVDLITE_RETURN_IF_ERROR(staging.await_published(chunk.step));
  const Range slice = chunk.slice(layout.locals.index);
  const std::uint64_t per_piece = std::max<std::uint64_t>(
      1,
      piece_bytes(slice.count() * batch.element_bytes, layout.hosts.size()) / batch.element_bytes);
  slots.resize(chunk_count(slice.count(), per_piece));
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const Range piece = chunk_at(slice.count(), per_piece, i);
    slots[i].range = {slice.begin + piece.begin, slice.begin + piece.end};
    const std::uint64_t offset = chunk.offset(slots[i].range);
    // Nobody else reads this part of this rank's buffer before the result lies in it.
    slots[i].lies_at = staging.own_buffer(chunk.step) + offset;
    batch.reduction.within_host(staging.buffers(chunk.step, offset), slots[i].lies_at,
                                slots[i].range.count());
    inter_host.scatter(slots[i], alone && slots.size() == 1);
  }
  return Status();
}

Status HostAllreduce::gather_slice(const Chunk& chunk, InterHostExchange& inter_host,
                                   std::vector<InterHostExchange::Slot>& slots) {
  if (!chunk.batch.layout.driver()) return Status();
  for (InterHostExchange::Slot& slot : slots) HVDLITE_RETURN_IF_ERROR(inter_host.reduce(slot));
  for (InterHostExchange::Slot& slot : slots) HVDLITE_RETURN_IF_ERROR(inter_host.take(slot));
  plane_.staging().reduced(chunk.step);
  return Status();
}

Status HostAllreduce::take_results(const Chunk& chunk) {
  const HostLayout& layout = chunk.batch.layout;
  Staging& staging = plane_.staging();
  HVDLITE_RETURN_IF_ERROR(staging.await_reduced(chunk.step, layout.drivers));
  for (int driver = 0; driver < layout.drivers; ++driver) {
    if (driver == layout.locals.index) continue;  // taken when it was reduced
    const Range slice = chunk.slice(driver);
    chunk.batch.copy_out(slice, staging.buffer_of(chunk.step, driver) + chunk.offset(slice));
  }
  staging.done(chunk.step);
  return Status();
}

}  // namespace hvdlite
