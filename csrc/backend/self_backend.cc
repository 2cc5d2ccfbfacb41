#include "backend/self_backend.h"

#include <cstring>

#include "collective/reduce.h"

namespace hvdlite {
namespace {

void copy(std::span<const std::byte> from, std::span<std::byte> to) {
  if (!to.empty() && from.data() != to.data()) std::memcpy(to.data(), from.data(), to.size());
}

}  // namespace

Status SelfBackend::allreduce(const Group&, DataType dtype, ReduceOp, std::span<const Piece> pieces,
                              Patience) {
  for (const Piece& piece : pieces) {
    scale_copy(dtype, piece.input, piece.output, piece.count, piece.prescale);
    scale_copy(dtype, piece.output, piece.output, piece.count, piece.postscale);
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
