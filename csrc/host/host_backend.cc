#include "host/host_backend.h"

#include <algorithm>
#include <cstring>

#include "kernels/reduce.h"

namespace hvdlite {
namespace {

// The average of one rank's values and of nothing from those that have joined.
void divide(DataType dtype, void* values, std::size_t count, int divisor) {
  const void* source = values;
  reduce(dtype, ReduceOp::kAverage, {&source, 1}, values, count, {divisor});
}

// Rounds as more ranks would.
void cast_and_back(ElementTypes types, const Piece& piece, int divisor) {
  constexpr std::size_t kBlock = 1024;
  std::byte narrow[kBlock * sizeof(std::uint16_t)];
  const std::size_t element_bytes = size_of(types.memory);
  for (std::size_t at = 0; at < piece.count; at += kBlock) {
    const std::size_t count = std::min(kBlock, piece.count - at);
    scale_copy(types, static_cast<const std::byte*>(piece.input) + at * element_bytes, narrow,
               count, piece.prescale);
    if (divisor != 1) divide(types.wire, narrow, count, divisor);
    scale_copy({types.wire, types.memory}, narrow,
               static_cast<std::byte*>(piece.output) + at * element_bytes, count, piece.postscale);
  }
}

}  // namespace

Status SelfBackend::allreduce(const Allreduce& call, Patience) {
  const ElementTypes types = call.types;
  const int divisor = call.op == ReduceOp::kAverage ? call.group.divisor() : 1;
  for (const Piece& piece : call.pieces) {
    if (types.cast()) {
      cast_and_back(types, piece, divisor);
      continue;
    }
    scale_copy(types, piece.input, piece.output, piece.count, piece.prescale);
    if (divisor != 1) divide(types.memory, piece.output, piece.count, divisor);
    scale_copy(types, piece.output, piece.output, piece.count, piece.postscale);
  }
  return Status();
}

}  // namespace hvdlite
