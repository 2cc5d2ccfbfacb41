#include "backend/self_backend.h"

#include <algorithm>
#include <cstring>

#include "kernels/reduce.h"

namespace hvdlite {
namespace {

void copy(std::span<const std::byte> from, std::span<std::byte> to) {
  if (!to.empty() && from.data() != to.data()) std::memcpy(to.data(), from.data(), to.size());
}

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

Status SelfBackend::allreduce(const Group& group, ElementTypes types, ReduceOp op,
                              std::span<const Piece> pieces, Patience) {
  const int divisor = op == ReduceOp::kAverage ? group.divisor() : 1;
  for (const Piece& piece : pieces) {
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

Status SelfBackend::allgather(const Group&, std::span<const std::byte> input,
                              std::span<const std::size_t>, std::span<std::byte> output, Patience) {
  copy(input, output);
  return Status();
}

Status SelfBackend::broadcast(const Group&, int, std::span<const std::byte> input,
                              std::span<std::byte> output, Patience) {
  copy(input, output);
  return Status();
}

Status SelfBackend::reducescatter(const Group& group, DataType dtype, ReduceOp op,
                                  const Piece& piece, std::span<const std::uint64_t>,
                                  Patience patience) {
  return SelfBackend::allreduce(group, dtype, op, {&piece, 1}, patience);
}

Status SelfBackend::alltoall(const Group&, std::span<const std::byte> input,
                             std::span<const std::size_t>, std::span<std::byte> output,
                             std::span<const std::size_t>, Patience) {
  copy(input, output);
  return Status();
}

}  // namespace hvdlite
