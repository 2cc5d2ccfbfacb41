// Gradient memory: device memory in which the gradients of buckets live from step to step
// (hvdlite/torch/bucket_memory.py). An *area* is one allocation of it. A framework
// holds an area, and gives parts of it as outputs of collectives. A data plane that finds a batch's
// outputs in one area, in the order and with the gaps of fusion_layout.h, reduces them there, and
// registers the area with NCCL at the first use.
//
// An area ends when its last holder lets go of it. That waits for the device, because streams that
// the core does not know may still read the area. The runner frees the memory later, once the data
// planes have forgotten it. A holder may outlive the engine. Threads: any thread may call
// allocate() and let go of an area; everything else is for the runner.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "gpu/cuda_device.h"
#include "gpu/nccl_api.h"

namespace hvdlite {

// Allocates memory of `device` that NCCL can register, if this NCCL can register memory; plain
// memory otherwise, and when `nccl` is null. kOutOfMemory names the size.
Result<DeviceMemory> allocate_for_nccl(const std::shared_ptr<CudaDevice>& device,
                                       const std::shared_ptr<const NcclApi>& nccl,
                                       std::size_t bytes);

class GradientMemory : public std::enable_shared_from_this<GradientMemory> {
 public:
  struct Area {
    CudaPointer address = 0;
    std::size_t bytes = 0;
  };
  using Holder = std::shared_ptr<const Area>;

  explicit GradientMemory(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}

  // Allocates an area of uninitialised memory. Errors are those of allocate_for_nccl().
  Result<Holder> allocate(const std::shared_ptr<const NcclApi>& nccl, std::size_t bytes);
  // The area in which this address lies; its `bytes` are 0 when there is none.
  Area find(CudaPointer address);
  // True when an area has ended since take_ended(). Any thread.
  bool any_ended() const { return any_ended_.load(std::memory_order_acquire); }
  // The memory of the areas that have ended. The caller frees it when no data plane knows it any
  // more.
  std::vector<DeviceMemory> take_ended();

 private:
  void end(DeviceMemory memory);

  const std::shared_ptr<CudaDevice> device_;
  Mutex mutex_;
  std::map<CudaPointer, std::size_t> areas_ HVDLITE_GUARDED_BY(mutex_);  // bytes by address
  std::vector<DeviceMemory> ended_ HVDLITE_GUARDED_BY(mutex_);
  std::atomic<bool> any_ended_{false};
};

}  // namespace hvdlite
