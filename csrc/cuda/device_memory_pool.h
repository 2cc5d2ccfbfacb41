// Device memory for results whose size nobody knew before: taken by the runner, given back by
// whoever has copied it out, and used again, because freeing memory stops the whole device.
// Any thread, except take().
#pragma once

#include <list>
#include <memory>

#include "cuda/cuda_device.h"

namespace hvdlite {

class DeviceMemoryPool {
 public:
  explicit DeviceMemoryPool(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}

  // At least `bytes`, ready for work on the communication stream. Runner only.
  Result<DeviceMemory> take(std::size_t bytes);
  // `after`: the last use.
  void give_back(DeviceMemory memory, CudaEventPtr after);

 private:
  struct Spare {
    DeviceMemory memory;
    CudaEventPtr after;
  };
  const std::shared_ptr<CudaDevice> device_;
  Mutex mutex_;
  std::list<Spare> spares_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
