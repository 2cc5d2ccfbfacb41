#include "gpu/self_device_backend.h"

#include <algorithm>
#include <limits>

#include "gpu/device_types.h"
#include "gpu/fusion_layout.h"
#include "gpu/staged_backend.h"
#include "host/host_backend.h"

namespace hvdlite {

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
        device().check(device().api().fill(address(piece.output), 0,
                                           piece.count * size_of(types.memory), device().stream()),
                       "filling memory"));
  }
  return workspace_.copies->enqueue(types.memory, types.memory, segments);
}

// Casts to the wire type and back, so that the result is rounded as with more ranks.
Status SelfDeviceBackend::cast_and_back(ElementTypes types, std::span<const Piece> pieces) {
  const auto rounds =
      lay_out(pieces, size_of(types.wire), std::numeric_limits<std::uint64_t>::max());
  Result<DeviceMemory> memory = workspace_.pool->take(std::max<std::uint64_t>(rounds[0].bytes, 1));
  HVDLITE_RETURN_IF_ERROR(memory.status());
  std::vector<CopySegment> in;
  std::vector<CopySegment> out;
  for (const FusedPart& part : rounds[0].parts) {
    const Piece& piece = pieces[part.piece];
    const CudaPointer place = memory.value().address() + part.offset;
    if (piece.input != nullptr) {
      in.push_back({address(piece.input), place, part.count, piece.prescale});
    } else {
      HVDLITE_RETURN_IF_ERROR(device().check(
          device().api().fill(place, 0, part.count * size_of(types.wire), device().stream()),
          "filling memory"));
    }
    out.push_back({place, address(piece.output), part.count, piece.postscale});
  }
  HVDLITE_RETURN_IF_ERROR(workspace_.copies->enqueue(types.memory, types.wire, in));
  HVDLITE_RETURN_IF_ERROR(workspace_.copies->enqueue(types.wire, types.memory, out));
  Result<CudaEventPtr> after = record();
  HVDLITE_RETURN_IF_ERROR(after.status());
  workspace_.pool->give_back(std::move(memory.value()), after.value());
  return Status();
}

Status SelfDeviceBackend::copy(std::span<const std::byte> from, std::span<std::byte> to) {
  if (to.empty() || from.data() == to.data()) return Status();
  const CudaDevice::Current current(device());
  return device().check(
      device().api().copy(address(to.data()), address(from.data()), to.size(), device().stream()),
      "copying");
}

Status SelfDeviceBackend::allgather(const Allgather& call, Patience) {
  return copy(call.input, call.output);
}

Status SelfDeviceBackend::broadcast(const Broadcast& call, Patience) {
  return copy(call.input, call.output);
}

Status SelfDeviceBackend::alltoall(const Alltoall& call, Patience) {
  return copy(call.input, call.output);
}

Status SelfDeviceBackend::reducescatter(const Reducescatter& call, Patience patience) {
  return allreduce({call.group, call.dtype, call.op, {&call.piece, 1}}, patience);
}

}  // namespace hvdlite
