#include "gpu/device_workspace.h"

namespace hvdlite {

Result<DeviceMemory> allocate_for_nccl(const std::shared_ptr<CudaDevice>& device,
                                       const std::shared_ptr<const NcclApi>& nccl,
                                       std::size_t bytes) {
  if (nccl != nullptr) {
    const CudaDevice::Current current(*device);
    void* memory = nullptr;
    if (nccl->memory_allocate(&memory, bytes) == NcclResult::kSuccess && memory != nullptr) {
      return DeviceMemory(address(memory), bytes, [nccl, on = device](CudaPointer freed) {
        const CudaDevice::Current freeing(*on);
        (void)nccl->memory_free(reinterpret_cast<void*>(freed));  // NOLINT: a device address
      });
    }
  }
  return device->allocate(bytes);
}

Result<GradientMemory::Holder> GradientMemory::allocate(const std::shared_ptr<const NcclApi>& nccl,
                                                        std::size_t bytes) {
  HVDLITE_ASSIGN_OR_RETURN(DeviceMemory allocated, allocate_for_nccl(device_, nccl, bytes));
  auto memory = std::make_shared<DeviceMemory>(std::move(allocated));
  const Area area{memory->address(), memory->bytes()};
  {
    MutexLock lock(mutex_);
    areas_[area.address] = area.bytes;
  }
  const auto let_go = [memory, device = device_, from = weak_from_this()](const Area* ended) {
    device->settle();
    if (const auto registry = from.lock()) registry->end(std::move(*memory));
    delete ended;  // NOLINT: a deleter
  };
  return Holder(new Area(area), let_go);
}

GradientMemory::Area GradientMemory::find(CudaPointer address) {
  MutexLock lock(mutex_);
  auto after = areas_.upper_bound(address);
  if (after == areas_.begin()) return {};
  const auto [begin, bytes] = *--after;
  return address < begin + bytes ? Area{begin, bytes} : Area{};
}

std::vector<DeviceMemory> GradientMemory::take_ended() {
  MutexLock lock(mutex_);
  for (const DeviceMemory& memory : ended_) areas_.erase(memory.address());
  return std::move(ended_);
}

void GradientMemory::end(DeviceMemory memory) {
  MutexLock lock(mutex_);
  ended_.push_back(std::move(memory));
}

Result<std::unique_ptr<DeviceWorkspace>> DeviceWorkspace::open(std::shared_ptr<const CudaApi> cuda,
                                                               int ordinal) {
  auto workspace = std::make_unique<DeviceWorkspace>();
  HVDLITE_ASSIGN_OR_RETURN(workspace->device, CudaDevice::open(std::move(cuda), ordinal));
  HVDLITE_ASSIGN_OR_RETURN(workspace->copies, SegmentCopies::load(workspace->device));
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
  HVDLITE_ASSIGN_OR_RETURN(fusion, allocate_for_nccl(device, nccl, bytes));
  return Status();
}

}  // namespace hvdlite
