// A data plane for memory of a GPU. The calls of Backend take addresses on the device. They return
// when the work has been given to the device's communication stream, not when it is done; the
// stream runs work in the order of the calls.
//
// A caller calls after_events(), then one or more collectives, then record(). poll() returns an
// error of the device that comes later. Implementations: NcclBackend; SelfDeviceBackend (groups of
// one rank); StagedBackend (no NCCL: through the host, where calls do wait). In an allreduce an
// input of nullptr stands for zeros. GpuPlane owns the data planes; only the runner calls them.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "gpu/cuda_device.h"
#include "gpu/device_workspace.h"
#include "host/host_backend.h"
#include "kernels/pieces.h"
#include "transport/topology.h"

namespace hvdlite {

class DeviceBackend : public Backend {
 public:
  virtual CudaDevice& device() const = 0;
  // Makes the collectives that are called next read and overwrite memory only after these points.
  Status after_events(std::span<const CudaEventPtr> producers) {
    for (const CudaEventPtr& event : producers) {
      HVDLITE_RETURN_IF_ERROR(device().wait(device().stream(), *event));
    }
    return Status();
  }
  // Marks the point after all work that was given to the stream so far.
  Result<CudaEventPtr> record() { return device().record(device().stream()); }
  // Drops all knowledge of memory that is about to be freed. No work is under way.
  virtual void forget_memory(CudaPointer /*address*/) {}
  // Returns an error that came after a call had returned. The runner asks while work is under way.
  virtual Status poll() { return Status(); }
  // Ends the work that is under way on the device, and lets go of the peers. The results of that
  // work must not be used, and no function is called afterwards.
  virtual void abort() {}
  // Lets go of the peers in good order, together with the peers, or aborts at the deadline. All
  // work has ended before.
  virtual void close(Deadline) {}
};

// True when a reduction runs on the device, false when it goes through the host: GPU kernels and
// NCCL do not know all element types and factors. Complex numbers are reduced as twice as many
// floats. This and the two functions below give the same result on every member of a group.
inline bool runs_on_device(const Group& group, ElementTypes types, ReduceOp op,
                           std::span<const Piece> pieces) {
  const DataType dtype = types.memory;
  if (is_complex(dtype)) return op == ReduceOp::kSum || op == ReduceOp::kAverage;
  if (is_floating(dtype)) return !types.cast() || dtype != DataType::kFloat64;
  if (op == ReduceOp::kAverage && group.average_over > 0) return false;
  const auto scaled = [](const Piece& piece) {
    return piece.prescale != 1.0 || piece.postscale != 1.0;
  };
  return size_of(dtype) != 2 && std::none_of(pieces.begin(), pieces.end(), scaled);
}

// Turns pieces of complex numbers into pieces of their real and imaginary parts.
inline std::vector<Piece> parts_of_complex(std::span<const Piece> pieces) {
  std::vector<Piece> parts(pieces.begin(), pieces.end());
  for (Piece& piece : parts) piece.count *= 2;
  return parts;
}

// Turns an average by group.divisor() into a sum of scaled values, because NCCL's own average
// divides by the number of ranks. Floats only.
inline std::vector<Piece> shares(const Group& group, std::span<const Piece> pieces) {
  std::vector<Piece> shares(pieces.begin(), pieces.end());
  for (Piece& piece : shares) piece.prescale /= group.divisor();
  return shares;
}

// The data plane of GPU tensors where some member has no NCCL, and of reductions that a device does
// not know (Adasum, packing between hosts, and what runs_on_device() refuses). Tensors go to the
// host, through the host's data plane, and back. That is correct and slow: its calls wait for the
// device.
class StagedBackend : public DeviceBackend {
 public:
  StagedBackend(DeviceWorkspace& workspace, Backend& host, int rank)  // both borrowed
      : workspace_(workspace), host_(host), rank_(rank) {}

  CudaDevice& device() const override { return *workspace_.device; }
  Status allreduce(const Allreduce& call, Patience patience) override;
  Status allgather(const Allgather& call, Patience patience) override;
  Status broadcast(const Broadcast& call, Patience patience) override;
  Status alltoall(const Alltoall& call, Patience patience) override;
  Status reducescatter(const Reducescatter& call, Patience patience) override;
  Status barrier(const Group& group, Patience patience) override {
    return host_.barrier(group, patience);
  }

 private:
  // Both copy and wait. A null source stands for zeros.
  Status fetch(const void* from, std::span<std::byte> to, Patience patience);
  Status store(std::span<const std::byte> from, void* to, Patience patience);
  // Waits for the communication stream.
  Status wait_for_device(Patience patience);

  DeviceWorkspace& workspace_;
  Backend& host_;
  const int rank_;                // This process has this rank in the world.
  std::vector<std::byte> input_;  // on the host
  std::vector<std::byte> output_;
};

// The data plane of a group of one rank on a GPU. It copies and scales on the device, and needs no
// NCCL.
class SelfDeviceBackend : public SelfPlane<DeviceBackend> {
 public:
  explicit SelfDeviceBackend(DeviceWorkspace& workspace) : workspace_(workspace) {}  // borrowed

  CudaDevice& device() const override { return *workspace_.device; }
  Status allreduce(const Allreduce& call, Patience patience) override;

 private:
  Status copy(std::span<const std::byte> from, std::span<std::byte> to) override;
  Status cast_and_back(ElementTypes types, std::span<const Piece> pieces);

  DeviceWorkspace& workspace_;
};

}  // namespace hvdlite
