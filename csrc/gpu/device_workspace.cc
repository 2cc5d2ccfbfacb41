#include "gpu/device_workspace.h"

namespace hvdlite {

Result<std::unique_ptr<DeviceWorkspace>> DeviceWorkspace::open(std::shared_ptr<const CudaApi> cuda,
                                                               int ordinal) {
  auto workspace = std::make_unique<DeviceWorkspace>();
  Result<std::shared_ptr<CudaDevice>> device = CudaDevice::open(std::move(cuda), ordinal);
  HVDLITE_RETURN_IF_ERROR(device.status());
  workspace->device = device.value();
  Result<std::unique_ptr<SegmentCopies>> copies = SegmentCopies::load(workspace->device);
  HVDLITE_RETURN_IF_ERROR(copies.status());
  workspace->copies = std::move(copies.value());
  workspace->pool =
      std::make_shared<DeviceMemoryPool>(workspace->device, DeviceMemoryPool::kSparesOfResults);
  workspace->kept =
      std::make_shared<DeviceMemoryPool>(workspace->device, DeviceMemoryPool::kAllSpares);
  workspace->gradients = std::make_shared<GradientMemory>(workspace->device);
  return workspace;
}

Status DeviceWorkspace::reserve_fusion(const std::shared_ptr<const NcclApi>& nccl,
                                       std::size_t bytes) {
  if (fusion.valid()) return Status();
  Result<DeviceMemory> memory = allocate_for_nccl(device, nccl, bytes);
  HVDLITE_RETURN_IF_ERROR(memory.status());
  fusion = std::move(memory.value());
  return Status();
}

}  // namespace hvdlite
