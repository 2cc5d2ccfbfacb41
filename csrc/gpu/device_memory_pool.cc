#include "gpu/device_memory_pool.h"

#include <bit>

namespace hvdlite {
namespace {

constexpr std::size_t kSmallest = 4096;

}  // namespace

Result<DeviceMemory> DeviceMemoryPool::take(std::size_t bytes) {
  const std::size_t rounded = std::bit_ceil(std::max(bytes, kSmallest));
  Spare found;
  {
    MutexLock lock(mutex_);
    for (auto at = spares_.begin(); at != spares_.end(); ++at) {
      if (at->memory.bytes() != rounded) continue;
      found = std::move(*at);
      spares_.erase(at);
      break;
    }
  }
  if (!found.memory.valid()) return device_->allocate(rounded);
  HVDLITE_RETURN_IF_ERROR(device_->wait(device_->stream(), *found.after));
  return std::move(found.memory);
}

void DeviceMemoryPool::give_back(DeviceMemory memory, CudaEventPtr after) {
  std::list<Spare> dropped;  // freed after the lock is released
  MutexLock lock(mutex_);
  spares_.push_front({std::move(memory), std::move(after)});
  if (spares_.size() > most_spares_) dropped.splice(dropped.end(), spares_, --spares_.end());
}

}  // namespace hvdlite
