#include "gpu/device_backend.h"

#include <algorithm>
#include <limits>
#include <thread>

namespace hvdlite {

Status StagedBackend::wait_for_device(Patience patience) {
  HVDLITE_ASSIGN_OR_RETURN(CudaEventPtr end, record());
  const Deadline deadline = Deadline::after(patience);
  while (!end->reached()) {
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

Status StagedBackend::allreduce(const Allreduce& call, Patience patience) {
  const auto& [group, types, op, pieces] = call;
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
  }
  HVDLITE_RETURN_IF_ERROR(host_.allreduce({group, types, op, staged}, patience));
  for (std::size_t i = 0; i < staged.size(); ++i) {
    const auto* result = static_cast<const std::byte*>(staged[i].output);
    HVDLITE_RETURN_IF_ERROR(
        store({result, staged[i].count * element_bytes}, pieces[i].output, patience));
  }
  return Status();
}

Status StagedBackend::allgather(const Allgather& call, Patience patience) {
  input_.resize(call.input.size());
  output_.resize(call.output.size());
  HVDLITE_RETURN_IF_ERROR(fetch(call.input.data(), input_, patience));
  HVDLITE_RETURN_IF_ERROR(host_.allgather({call.group, input_, call.bytes, output_}, patience));
  return store(output_, call.output.data(), patience);
}

Status StagedBackend::broadcast(const Broadcast& call, Patience patience) {
  output_.resize(call.output.size());
  if (call.root == rank_) HVDLITE_RETURN_IF_ERROR(fetch(call.input.data(), output_, patience));
  HVDLITE_RETURN_IF_ERROR(host_.broadcast({call.group, call.root, output_, output_}, patience));
  return store(output_, call.output.data(), patience);
}

Status StagedBackend::alltoall(const Alltoall& call, Patience patience) {
  input_.resize(call.input.size());
  output_.resize(call.output.size());
  HVDLITE_RETURN_IF_ERROR(fetch(call.input.data(), input_, patience));
  HVDLITE_RETURN_IF_ERROR(
      host_.alltoall({call.group, input_, call.send_bytes, output_, call.receive_bytes}, patience));
  return store(output_, call.output.data(), patience);
}

Status StagedBackend::reducescatter(const Reducescatter& call, Patience patience) {
  const Piece& piece = call.piece;
  const std::uint64_t own = call.counts[call.group.index_of(rank_)];
  input_.resize(piece.count * size_of(call.dtype));
  output_.resize(own * size_of(call.dtype));
  HVDLITE_RETURN_IF_ERROR(fetch(piece.input, input_, patience));
  const Piece staged{input_.data(), output_.data(), piece.count, piece.prescale, piece.postscale};
  HVDLITE_RETURN_IF_ERROR(
      host_.reducescatter({call.group, call.dtype, call.op, staged, call.counts}, patience));
  return store(output_, piece.output, patience);
}

Status SelfDeviceBackend::allreduce(const Allreduce& call, Patience patience) {
  const auto& [group, types, op, pieces] = call;
  if (is_complex(types.memory)) {
    // The same for every op, because there is no other rank to reduce with.
    return allreduce({group, component_of(types.memory), op, parts_of_complex(pieces)}, patience);
  }
  if (op == ReduceOp::kAverage && group.average_over > 0 && is_floating(types.memory)) {
    return allreduce({group, types, ReduceOp::kSum, shares(group, pieces)}, patience);
  }
  if (!runs_on_device(group, types, op, pieces)) {
    SelfBackend host;
    return StagedBackend(workspace_, host, group.ranks[0]).allreduce(call, patience);
  }
  const CudaDevice::Current current(device());
  if (types.cast()) return cast_and_back(types, pieces);
  std::vector<CopySegment> segments;
  for (const Piece& piece : pieces) {
    const double scale = piece.prescale * piece.postscale;
    if (piece.count == 0 || (piece.input == piece.output && scale == 1.0)) continue;
    if (piece.input != nullptr) {
      segments.push_back({address(piece.input), address(piece.output), piece.count, scale});
      continue;
    }
    HVDLITE_RETURN_IF_ERROR(
        device().zero(address(piece.output), piece.count * size_of(types.memory)));
  }
  return workspace_.copies->enqueue(types.memory, types.memory, segments);
}

// Casts to the wire type and back, so that the result is rounded as with more ranks.
Status SelfDeviceBackend::cast_and_back(ElementTypes types, std::span<const Piece> pieces) {
  const auto rounds =
      lay_out(pieces, size_of(types.wire), std::numeric_limits<std::uint64_t>::max());
  HVDLITE_ASSIGN_OR_RETURN(DeviceMemory memory,
                           workspace_.pool->take(std::max<std::uint64_t>(rounds[0].bytes, 1)));
  std::vector<CopySegment> in;
  std::vector<CopySegment> out;
  for (const FusedPart& part : rounds[0].parts) {
    const Piece& piece = pieces[part.piece];
    const CudaPointer place = memory.address() + part.offset;
    if (piece.input != nullptr) {
      in.push_back({address(piece.input), place, part.count, piece.prescale});
    } else {
      HVDLITE_RETURN_IF_ERROR(device().zero(place, part.count * size_of(types.wire)));
    }
    out.push_back({place, address(piece.output), part.count, piece.postscale});
  }
  HVDLITE_RETURN_IF_ERROR(workspace_.copies->enqueue(types.memory, types.wire, in));
  HVDLITE_RETURN_IF_ERROR(workspace_.copies->enqueue(types.wire, types.memory, out));
  HVDLITE_ASSIGN_OR_RETURN(CudaEventPtr after, record());
  workspace_.pool->give_back(std::move(memory), after);
  return Status();
}

Status SelfDeviceBackend::copy(std::span<const std::byte> from, std::span<std::byte> to) {
  if (to.empty() || from.data() == to.data()) return Status();
  const CudaDevice::Current current(device());
  return device().check(
      device().api().copy(address(to.data()), address(from.data()), to.size(), device().stream()),
      "copying");
}

}  // namespace hvdlite
