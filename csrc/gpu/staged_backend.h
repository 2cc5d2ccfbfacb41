// The data plane of GPU tensors where some member has no NCCL, and of reductions that a device does
// not know (Adasum, packing between hosts, and those of device_types.h). Tensors go to the host,
// through the host's data plane, and back. That is correct and slow: its calls wait for the device.
// Runner only.
#pragma once

#include <vector>

#include "gpu/device_backend.h"
#include "gpu/device_workspace.h"

namespace hvdlite {

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

}  // namespace hvdlite
