#include "backend/device_workspace.h"

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
  workspace->pool = std::make_shared<DeviceMemoryPool>(workspace->device);
  workspace->finite = std::make_unique<FiniteWords>(workspace->device);
  return workspace;
}

Status DeviceWorkspace::reserve_fusion(const std::shared_ptr<const NcclApi>& nccl,
                                       std::size_t bytes) {
  if (fusion.valid()) return Status();
  if (nccl->can_register()) {
    const CudaDevice::Current current(*device);
    void* memory = nullptr;
    if (nccl->memory_allocate(&memory, bytes) == NcclResult::kSuccess && memory != nullptr) {
      const auto free = [nccl, on = device](CudaPointer address) {
        const CudaDevice::Current freeing(*on);
        (void)nccl->memory_free(reinterpret_cast<void*>(address));  // NOLINT: a device address
      };
      fusion = DeviceMemory(address(memory), bytes, free);
      return Status();
    }
  }
  Result<DeviceMemory> plain = device->allocate(bytes);
  HVDLITE_RETURN_IF_ERROR(plain.status());
  fusion = std::move(plain.value());
  return Status();
}

}  // namespace hvdlite
