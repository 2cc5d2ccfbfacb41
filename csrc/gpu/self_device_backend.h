// The data plane of a group of one rank on a GPU. It copies and scales on the device, and needs no
// NCCL. Runner only.
#pragma once

#include "gpu/device_backend.h"
#include "gpu/device_workspace.h"

namespace hvdlite {

class SelfDeviceBackend : public DeviceBackend {
 public:
  explicit SelfDeviceBackend(DeviceWorkspace& workspace) : workspace_(workspace) {}  // borrowed

  CudaDevice& device() const override { return *workspace_.device; }
  Status allreduce(const Allreduce& call, Patience patience) override;
  Status allgather(const Allgather& call, Patience patience) override;
  Status broadcast(const Broadcast& call, Patience patience) override;
  Status alltoall(const Alltoall& call, Patience patience) override;
  Status reducescatter(const Reducescatter& call, Patience patience) override;
  Status barrier(const Group&, Patience) override { return Status(); }

 private:
  Status copy(std::span<const std::byte> from, std::span<std::byte> to);
  Status cast_and_back(ElementTypes types, std::span<const Piece> pieces);

  DeviceWorkspace& workspace_;
};

}  // namespace hvdlite
