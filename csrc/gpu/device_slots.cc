#include "gpu/device_slots.h"

namespace hvdlite {

Result<DeviceMemory> allocate_for_nccl(const std::shared_ptr<CudaDevice>& device,
                                       const std::shared_ptr<const NcclApi>& nccl,
                                       std::size_t bytes) {
  if (nccl != nullptr && nccl->can_register()) {
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

Result<DeviceSlots::Holder> DeviceSlots::allocate(const std::shared_ptr<const NcclApi>& nccl,
                                                  std::size_t bytes) {
  Result<DeviceMemory> allocated = allocate_for_nccl(device_, nccl, bytes);
  HVDLITE_RETURN_IF_ERROR(allocated.status());
  auto memory = std::make_shared<DeviceMemory>(std::move(allocated.value()));
  const Slot slot{memory->address(), memory->bytes()};
  {
    MutexLock lock(mutex_);
    slots_[slot.address] = slot.bytes;
  }
  const auto let_go = [memory, device = device_, from = weak_from_this()](const Slot* ended) {
    device->settle();
    if (const auto slots = from.lock()) slots->end(std::move(*memory));
    delete ended;  // NOLINT: a deleter
  };
  return Holder(new Slot(slot), let_go);
}

DeviceSlots::Slot DeviceSlots::find(CudaPointer address) {
  MutexLock lock(mutex_);
  auto after = slots_.upper_bound(address);
  if (after == slots_.begin()) return {};
  const auto [begin, bytes] = *--after;
  return address < begin + bytes ? Slot{begin, bytes} : Slot{};
}

std::vector<DeviceMemory> DeviceSlots::take_ended() {
  MutexLock lock(mutex_);
  any_ended_.store(false, std::memory_order_release);
  for (const DeviceMemory& memory : ended_) slots_.erase(memory.address());
  return std::move(ended_);
}

void DeviceSlots::end(DeviceMemory memory) {
  MutexLock lock(mutex_);
  ended_.push_back(std::move(memory));
  any_ended_.store(true, std::memory_order_release);
}

}  // namespace hvdlite
