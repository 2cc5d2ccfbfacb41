#include "gpu/staged_backend.h"

#include <algorithm>
#include <thread>

#include "kernels/finite.h"

namespace hvdlite {
Status StagedBackend::wait_for_device(Patience patience) {
  const Result<CudaEventPtr> end = record();
  HVDLITE_RETURN_IF_ERROR(end.status());
  const Deadline deadline = Deadline::after(patience);
  while (!end.value()->reached()) {
    if (deadline.passed()) {
      return Status(StatusCode::kTimeout,
                    device().describe() + " did not finish a copy within collective_timeout");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return Status();
}

Status StagedBackend::fetch(const void* from, std::span<std::byte> to, Patience patience) {
  if (to.empty()) return Status();
  if (from == nullptr) {
    std::fill(to.begin(), to.end(), std::byte{0});
    return Status();
  }
  const CudaDevice::Current current(device());
  HVDLITE_RETURN_IF_ERROR(device().check(
      device().api().copy_to_host(to.data(), address(from), to.size(), device().stream()),
      "copying to the host"));
  return wait_for_device(patience);
}

Status StagedBackend::store(std::span<const std::byte> from, void* to, Patience patience) {
  if (from.empty()) return Status();
  const CudaDevice::Current current(device());
  HVDLITE_RETURN_IF_ERROR(device().check(
      device().api().copy_to_device(address(to), from.data(), from.size(), device().stream()),
      "copying to the device"));
  return wait_for_device(patience);
}

Status StagedBackend::allreduce(const Group& group, ElementTypes types, ReduceOp op,
                                std::span<const Piece> pieces, Patience patience) {
  std::size_t bytes = 0;
  const std::size_t element_bytes = size_of(types.memory);
  for (const Piece& piece : pieces) bytes += piece.count * element_bytes;
  input_.resize(bytes);
  std::vector<Piece> staged(pieces.begin(), pieces.end());
  std::span<std::byte> rest = input_;
  for (Piece& piece : staged) {
    const auto block = rest.first(piece.count * element_bytes);
    rest = rest.subspan(block.size());
    HVDLITE_RETURN_IF_ERROR(fetch(piece.input, block, patience));
    piece.input = piece.output = block.data();
    if (nonfinite_ != nullptr &&
        first_nonfinite(types, piece.input, piece.count, piece.prescale) < piece.count) {
      *nonfinite_ = 1;
    }
  }
  nonfinite_ = nullptr;
  HVDLITE_RETURN_IF_ERROR(host_.allreduce(group, types, op, staged, patience));
  for (std::size_t i = 0; i < staged.size(); ++i) {
    const auto* result = static_cast<const std::byte*>(staged[i].output);
    HVDLITE_RETURN_IF_ERROR(
        store({result, staged[i].count * element_bytes}, pieces[i].output, patience));
  }
  return Status();
}

Status StagedBackend::allgather(const Group& group, std::span<const std::byte> input,
                                std::span<const std::size_t> bytes, std::span<std::byte> output,
                                Patience patience) {
  input_.resize(input.size());
  output_.resize(output.size());
  HVDLITE_RETURN_IF_ERROR(fetch(input.data(), input_, patience));
  HVDLITE_RETURN_IF_ERROR(host_.allgather(group, input_, bytes, output_, patience));
  return store(output_, output.data(), patience);
}

Status StagedBackend::broadcast(const Group& group, int root, std::span<const std::byte> input,
                                std::span<std::byte> output, Patience patience) {
  output_.resize(output.size());
  if (root == rank_) HVDLITE_RETURN_IF_ERROR(fetch(input.data(), output_, patience));
  HVDLITE_RETURN_IF_ERROR(host_.broadcast(group, root, output_, output_, patience));
  return store(output_, output.data(), patience);
}

Status StagedBackend::reducescatter(const Group& group, DataType dtype, ReduceOp op,
                                    const Piece& piece, std::span<const std::uint64_t> counts,
                                    Patience patience) {
  const std::uint64_t own = counts[group.index_of(rank_)];
  input_.resize(piece.count * size_of(dtype));
  output_.resize(own * size_of(dtype));
  HVDLITE_RETURN_IF_ERROR(fetch(piece.input, input_, patience));
  const Piece staged{input_.data(), output_.data(), piece.count, piece.prescale, piece.postscale};
  HVDLITE_RETURN_IF_ERROR(host_.reducescatter(group, dtype, op, staged, counts, patience));
  return store(output_, piece.output, patience);
}

Status StagedBackend::alltoall(const Group& group, std::span<const std::byte> input,
                               std::span<const std::size_t> send_bytes, std::span<std::byte> output,
                               std::span<const std::size_t> receive_bytes, Patience patience) {
  input_.resize(input.size());
  output_.resize(output.size());
  HVDLITE_RETURN_IF_ERROR(fetch(input.data(), input_, patience));
  HVDLITE_RETURN_IF_ERROR(
      host_.alltoall(group, input_, send_bytes, output_, receive_bytes, patience));
  return store(output_, output.data(), patience);
}

}  // namespace hvdlite
