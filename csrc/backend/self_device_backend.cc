#include "backend/self_device_backend.h"

namespace hvdlite {
Status SelfDeviceBackend::allreduce(const Group&, DataType dtype, ReduceOp,
                                    std::span<const Piece> pieces, Patience) {
  const CudaDevice::Current current(device());
  std::vector<CopySegment> segments;
  for (const Piece& piece : pieces) {
    const double scale = piece.prescale * piece.postscale;
    if (piece.count == 0 || (piece.input == piece.output && scale == 1.0)) continue;
    if (piece.input != nullptr) {
      segments.push_back({address(piece.input), address(piece.output), piece.count, scale});
      continue;
    }
    HVDLITE_RETURN_IF_ERROR(
        device().check(device().api().fill(address(piece.output), 0, piece.count * size_of(dtype),
                                           device().stream()),
                       "filling memory"));
  }
  return workspace_.copies->enqueue(dtype, dtype, segments);
}

Status SelfDeviceBackend::copy(std::span<const std::byte> from, std::span<std::byte> to) {
  if (to.empty() || from.data() == to.data()) return Status();
  const CudaDevice::Current current(device());
  return device().check(
      device().api().copy(address(to.data()), address(from.data()), to.size(), device().stream()),
      "copying");
}

Status SelfDeviceBackend::allgather(const Group&, std::span<const std::byte> input,
                                    std::span<const std::size_t>, std::span<std::byte> output,
                                    Patience) {
  return copy(input, output);
}

Status SelfDeviceBackend::broadcast(const Group&, int, std::span<const std::byte> input,
                                    std::span<std::byte> output, Patience) {
  return copy(input, output);
}

Status SelfDeviceBackend::reducescatter(const Group& group, DataType dtype, ReduceOp op,
                                        const Piece& piece, std::span<const std::uint64_t>,
                                        Patience patience) {
  return allreduce(group, dtype, op, {&piece, 1}, patience);
}

Status SelfDeviceBackend::alltoall(const Group&, std::span<const std::byte> input,
                                   std::span<const std::size_t>, std::span<std::byte> output,
                                   std::span<const std::size_t>, Patience) {
  return copy(input, output);
}

}  // namespace hvdlite
