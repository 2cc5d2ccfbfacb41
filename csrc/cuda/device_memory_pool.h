// Device memory for results of unknown size. The runner takes memory for a result; the thread that
// has copied the result out gives the memory back. The pool then uses it again, because freeing
// memory stops the whole device. Any thread, except take(). The workspace of a device and the
// results share the pool.
#pragma once

#include <list>
#include <memory>

#include "cuda/cuda_device.h"

namespace hvdlite {

class DeviceMemoryPool {
 public:
  explicit DeviceMemoryPool(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}

  // Gives memory of at least `bytes`, ready for work on the communication stream. Runner only.
  // kOutOfMemory names the size.
  Result<DeviceMemory> take(std::size_t bytes);
  // Takes memory back; `after` is the point after its last use.
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
