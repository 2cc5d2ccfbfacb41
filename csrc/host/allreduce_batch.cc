#include "host/allreduce_batch.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/reduce.h"

namespace hvdlite {

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
