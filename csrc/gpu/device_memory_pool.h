// Device memory that is used again, because freeing memory stops the whole device. The runner takes
// memory; the thread that has used it last gives it back. Sizes are rounded up to powers of two.
// Any thread, except take(). The workspace of a device and what was taken share the pool.
//
// Results come in any size, so their pool bounds its spares by a number, kSparesOfResults. The
// inputs that an elastic job keeps have the same sizes in each step, one for each tensor that is
// reduced in place; there all memory is kept: it is at most what was in use at one time, size by
// size, and ends with the engine. A bound of 8 would allocate and free the rest of the tensors in
// each step.
#pragma once

#include <list>
#include <memory>

#include "gpu/cuda_device.h"

namespace hvdlite {

class DeviceMemoryPool {
 public:
  static constexpr std::size_t kSparesOfResults = 8;
  static constexpr std::size_t kAllSpares = SIZE_MAX;

  DeviceMemoryPool(std::shared_ptr<CudaDevice> device, std::size_t most_spares)
      : device_(std::move(device)), most_spares_(most_spares) {}

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
  const std::size_t most_spares_;  // the one that was given back first goes
  Mutex mutex_;
  std::list<Spare> spares_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
