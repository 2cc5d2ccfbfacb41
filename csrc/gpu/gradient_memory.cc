#include "gpu/gradient_memory.h"

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
  Result<DeviceMemory> allocated = allocate_for_nccl(device_, nccl, bytes);
  HVDLITE_RETURN_IF_ERROR(allocated.status());
  auto memory = std::make_shared<DeviceMemory>(std::move(allocated.value()));
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
  any_ended_.store(false, std::memory_order_release);
  for (const DeviceMemory& memory : ended_) areas_.erase(memory.address());
  return std::move(ended_);
}

void GradientMemory::end(DeviceMemory memory) {
  MutexLock lock(mutex_);
  ended_.push_back(std::move(memory));
  any_ended_.store(true, std::memory_order_release);
}

}  // namespace hvdlite
