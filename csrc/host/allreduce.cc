#include "host/allreduce.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/reduce.h"

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

Status HostAllreduce::run(const Allreduce& call, Patience patience) {
  const HostLayout& layout = plane_.layout_of(call.group);
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
  InterHostExchange inter_host(plane_.exchange().begin(batch.patience, kAllreduce), batch);
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
  InterHostExchange inter_host(plane_.exchange().begin(batch.patience, kAllreduce), batch);
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

namespace {

std::uint64_t number_of(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

// Nothing is staged, so chunks need not fit into a cache: longer ones than staging has save waits.
constexpr std::uint64_t kLonger = 16;

// FNV-1a over 64-bit numbers.
constexpr std::uint64_t kCheckBegin = 0xcbf29ce484222325;
std::uint64_t mix(std::uint64_t check, std::uint64_t number) {
  return (check ^ number) * 0x100000001b3;
}

}  // namespace

Staging::Place SharedGradients::place_of(const AllreduceBatch& batch) const {
  const HostLayout& layout = batch.layout;
  if (layout.spans_hosts() || batch.types.cast() || batch.pieces.prescaled()) return {};
  const std::span<std::byte> area =
      plane_.staging().gradients_of(layout.locals, layout.locals.index);
  const std::uint64_t from = number_of(area.data());
  Staging::Place place{0, kCheckBegin};
  bool inside = true;
  bool first = true;
  batch.pieces.for_each(
      {0, batch.pieces.elements()}, [&](const Piece&, const std::byte* input, std::byte* output,
                                        std::uint64_t, std::uint64_t count) {
        const std::uint64_t begin = number_of(output) - from;  // huge where it lies before the area
        inside = inside && input == output && begin < area.size() &&
                 count * batch.element_bytes <= area.size() - begin;
        if (first) place.begin = begin;
        first = false;
        place.check = mix(place.check, begin - place.begin);
      });
  return inside ? place : Staging::Place();
}

void SharedGradients::show(const AllreduceBatch& batch, const Staging::Step& step) {
  plane_.staging().show(step, place_of(batch));
}

bool SharedGradients::found(const AllreduceBatch& batch, const Staging::Step& step) {
  const Staging& staging = plane_.staging();
  const Staging::Locals& locals = batch.layout.locals;
  const auto begin_of = [&](int local, Staging::Place place) {
    return number_of(staging.gradients_of(locals, local).data()) + place.begin;
  };
  const Staging::Place own = staging.place_of(step, locals.index);
  members_.clear();
  for (int local = 0; local < static_cast<int>(locals.group.ranks.size()); ++local) {
    const Staging::Place place = staging.place_of(step, local);
    if (place.begin == Staging::Place::kNowhere || place.check != own.check) return false;
    members_.push_back(
        static_cast<std::ptrdiff_t>(begin_of(local, place) - begin_of(locals.index, own)));
  }
  return true;
}

Status SharedGradients::reduce(const AllreduceBatch& batch, Range elements) {
  const HostLayout& layout = batch.layout;
  Staging& staging = plane_.staging();
  plane_.count_unstaged(elements.count() * batch.element_bytes);
  const std::uint64_t per_chunk = kLonger * plane_.chunk_bytes(layout) / batch.element_bytes;
  const auto chunk = [&](std::uint64_t k) -> Range {
    const Range behind = chunk_at(elements.count(), per_chunk, k);
    return {elements.begin + behind.begin, elements.begin + behind.end};
  };
  const auto slice = [&](std::uint64_t k, int driver) {
    return batch.part(chunk(k), layout.drivers, driver);
  };
  Staging::Step step;
  const auto publish = [&](const Staging::Step& begun, std::uint64_t k) -> Status {
    batch.save_inputs(chunk(k));
    batch.finish_in_place(slice(k, layout.locals.index), members_);
    staging.reduced(begun);
    return Status();
  };
  const auto take = [&](const Staging::Step& reduced, std::uint64_t k) -> Status {
    HVDLITE_RETURN_IF_ERROR(staging.await_reduced(reduced, layout.drivers));
    for (int driver = 0; driver < layout.drivers; ++driver) {
      if (driver != layout.locals.index) batch.copy_from(slice(k, driver), members_[driver]);
    }
    staging.done(reduced);
    step = reduced;
    return Status();
  };
  const std::uint64_t steps = chunk_count(elements.count(), per_chunk);
  HVDLITE_RETURN_IF_ERROR(
      plane_.pipeline(layout, batch.patience, kAllreduce, steps, publish, take));
  return staging.await_done(step);
}

namespace {

// From shorter runs on, a copy into a buffer costs less than system calls for each run.
constexpr std::uint64_t kLongRun = 32 << 10;  // bytes
// Up to so many bytes for the other hosts together, a piece goes to all of them as a whole.
constexpr std::uint64_t kLittle = 64 << 10;

}  // namespace

bool InterHostExchange::travels_from_tensors(const AllreduceBatch& batch, Range range) {
  if (batch.types.cast() || batch.pieces.prescaled()) return false;
  std::uint64_t runs = 0;
  batch.pieces.for_each(range, [&](auto&&...) { ++runs; });
  return runs <= 1 || range.count() * batch.element_bytes / runs >= kLongRun;
}

template <typename Visit>
void InterHostExchange::for_each_span(const Slot& slot, Range part, Visit visit) const {
  const std::uint64_t element_bytes = batch_.element_bytes;
  if (slot.lies_at != nullptr) {
    std::byte* at = slot.lies_at + (part.begin - slot.range.begin) * element_bytes;
    return visit(at, at, part.count() * element_bytes);
  }
  batch_.pieces.for_each(part,
                         [&](const Piece&, const std::byte* input, std::byte* output, std::uint64_t,
                             std::uint64_t count) { visit(input, output, count * element_bytes); });
}

void InterHostExchange::scatter(Slot& slot, bool alone) {
  const HostLayout& layout = batch_.layout;
  const std::size_t hosts = layout.hosts.size();
  slot.little = alone && slot.range.count() * batch_.element_bytes * (hosts - 1) <= kLittle;
  slot.parts.clear();
  for (std::size_t h = 0; h < hosts; ++h) {
    slot.parts.push_back(slot.little ? slot.range : batch_.part(slot.range, hosts, h));
  }
  const std::size_t own_bytes = slot.parts[layout.host].count() * batch_.element_bytes;
  if (slot.received.size() < hosts * own_bytes) slot.received.resize(hosts * own_bytes);
  for (std::size_t h = 0; h < hosts; ++h) {
    if (h == layout.host) continue;
    for_each_span(slot, slot.parts[h], [&](const std::byte* input, std::byte*, std::size_t bytes) {
      exchange_.send(layout.peers[h], {input, bytes});
    });
    exchange_.receive(layout.peers[h], {slot.received.data() + h * own_bytes, own_bytes});
  }
  slot.scattered = exchange_.mark();
  exchange_.send_some();
}

Status InterHostExchange::reduce(Slot& slot) {
  const HostLayout& layout = batch_.layout;
  const Range own = slot.parts[layout.host];
  // What is sent from an output must have left before the result overwrites it.
  HVDLITE_RETURN_IF_ERROR(slot.little ? exchange_.await_moved(slot.scattered)
                                      : exchange_.await_received(slot.scattered));
  std::byte* lies_at = slot.lies_at;
  if (lies_at != nullptr) lies_at += (own.begin - slot.range.begin) * batch_.element_bytes;
  std::vector<const void*> sources;
  for (std::size_t h = 0; h < layout.hosts.size(); ++h) {
    const std::byte* received = slot.received.data() + h * own.count() * batch_.element_bytes;
    sources.push_back(h == layout.host ? lies_at : received);
  }
  batch_.finish(own, sources, lies_at);
  slot.gathered = slot.scattered;
  if (slot.little) return Status();
  for (std::size_t h = 0; h < layout.hosts.size(); ++h) {
    if (h == layout.host) continue;
    for_each_span(slot, own, [&](const std::byte*, std::byte* output, std::size_t bytes) {
      exchange_.send(layout.peers[h], {output, bytes});
    });
    for_each_span(slot, slot.parts[h], [&](const std::byte*, std::byte* output, std::size_t bytes) {
      exchange_.receive(layout.peers[h], {output, bytes});
    });
  }
  slot.gathered = exchange_.mark();
  exchange_.send_some();
  return Status();
}

Status InterHostExchange::take(Slot& slot) {
  HVDLITE_RETURN_IF_ERROR(exchange_.await_moved(slot.gathered));
  if (slot.lies_at == nullptr) return Status();
  if (slot.little) {
    if (batch_.types.cast()) batch_.copy_out(slot.range, slot.lies_at);
    return Status();
  }
  for (std::size_t h = 0; h < slot.parts.size(); ++h) {
    // Where nothing is cast, reduce() has written this host's part to the outputs.
    if (h == batch_.layout.host && !batch_.types.cast()) continue;
    const Range part = slot.parts[h];
    batch_.copy_out(part, slot.lies_at + (part.begin - slot.range.begin) * batch_.element_bytes);
  }
  return Status();
}

void AllreduceBatch::save_inputs(Range range) const {
  if (!saves) return;
  const TraceSpan traced = plane.part("keep");
  const std::uint64_t memory_bytes = size_of(types.memory);
  pieces.for_each(range, [&](const Piece& piece, const std::byte* input, std::byte*, std::uint64_t,
                             std::uint64_t count) {
    if (piece.copy == nullptr) return;
    const std::uint64_t bytes = count * memory_bytes;
    stream_copy(input, piece.copy->to + piece.copy->bytes, bytes);
    piece.copy->bytes += bytes;
  });
}

void AllreduceBatch::copy_in(Range range, std::byte* to) const {
  if (range.count() == 0) return;
  const TraceSpan traced = plane.part("pack");
  pieces.for_each(range, [&](const Piece& piece, const std::byte* input, std::byte*,
                             std::uint64_t at, std::uint64_t count) {
    scale_copy(types, input, to + at * element_bytes, count, piece.prescale);
  });
}

void AllreduceBatch::copy_out(Range range, const std::byte* from) const {
  if (range.count() == 0) return;
  const TraceSpan traced = plane.part("unpack");
  const ElementTypes back{types.wire, types.memory};
  pieces.for_each(range, [&](const Piece& piece, const std::byte*, std::byte* output,
                             std::uint64_t at, std::uint64_t count) {
    const double factor = back.cast() ? piece.postscale : 1.0;  // otherwise finish() has scaled
    scale_copy(back, from + at * element_bytes, output, count, factor);
  });
}

void AllreduceBatch::finish(Range range, Sources sources, std::byte* to) const {
  if (types.cast()) return finish_cast(range, sources, to);
  const TraceSpan traced = plane.part("reduce");
  std::vector<const void*> at_piece(sources.size());
  pieces.for_each(range, [&](const Piece& piece, const std::byte* input, std::byte* output,
                             std::uint64_t at, std::uint64_t count) {
    const std::uint64_t offset = at * element_bytes;
    std::transform(sources.begin(), sources.end(), at_piece.begin(), [&](const void* source) {
      return source == nullptr ? input : static_cast<const std::byte*>(source) + offset;
    });
    reduction.finish(at_piece, output, count, piece.postscale);
    if (to != nullptr) std::memcpy(to + offset, output, count * element_bytes);
  });
}

void AllreduceBatch::finish_in_place(Range range, Distances members) const {
  const TraceSpan traced = plane.part("reduce");
  std::vector<const void*> sources(members.size());
  pieces.for_each(range, [&](const Piece& piece, const std::byte* input, std::byte* output,
                             std::uint64_t, std::uint64_t count) {
    std::transform(members.begin(), members.end(), sources.begin(),
                   [&](std::ptrdiff_t distance) { return input + distance; });
    reduction.finish(sources, output, count, piece.postscale);
  });
}

void AllreduceBatch::copy_from(Range range, std::ptrdiff_t member) const {
  const TraceSpan traced = plane.part("copy");
  pieces.for_each(range, [&](const Piece&, const std::byte* input, std::byte* output, std::uint64_t,
                             std::uint64_t count) {
    std::memcpy(output, input + member, count * element_bytes);
  });
}

void AllreduceBatch::finish_cast(Range range, Sources sources, std::byte* to) const {
  {
    const TraceSpan traced = plane.part("reduce");
    reduction.finish(sources, to, range.count(), 1.0);
  }
  // Between hosts the slice is taken as a whole, once all of its parts are there.
  if (!layout.spans_hosts()) copy_out(range, to);
}

}  // namespace hvdlite
