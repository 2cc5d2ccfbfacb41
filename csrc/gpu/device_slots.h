// Slots: device memory that gradients stay in from step to step. Whoever has a slot gives its parts
// as outputs of collectives; a data plane that finds a batch's outputs in one slot, in the order
// and with the gaps of fusion_layout.h, reduces them there. The data planes make a slot known to
// NCCL when they use it first.
//
// A slot ends when its last holder lets go of it, which waits for the device: streams that nobody
// here knows may still read it. Its memory is freed later, by the runner, once the data planes have
// forgotten it; a holder may outlive the engine. Threads: allocate() and letting go, any; the rest,
// runner only.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "cuda/cuda_device.h"
#include "nccl/nccl_api.h"

namespace hvdlite {

// Memory of `device` that NCCL can register where this NCCL can; plain memory where it cannot, or
// without one (null). kOutOfMemory names the size.
Result<DeviceMemory> allocate_for_nccl(const std::shared_ptr<CudaDevice>& device,
                                       const std::shared_ptr<const NcclApi>& nccl,
                                       std::size_t bytes);

class DeviceSlots : public std::enable_shared_from_this<DeviceSlots> {
 public:
  struct Slot {
    CudaPointer address = 0;
    std::size_t bytes = 0;
  };
  using Holder = std::shared_ptr<const Slot>;

  explicit DeviceSlots(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}

  // Uninitialised memory. Errors as of allocate_for_nccl().
  Result<Holder> allocate(const std::shared_ptr<const NcclApi>& nccl, std::size_t bytes);
  // The slot that this address lies in; of `bytes` 0: none.
  Slot find(CudaPointer address);
  // Some slots have ended since take_ended(). Any thread.
  bool any_ended() const { return any_ended_.load(std::memory_order_acquire); }
  // What they had, to be freed when no data plane knows it any more.
  std::vector<DeviceMemory> take_ended();

 private:
  void end(DeviceMemory memory);

  const std::shared_ptr<CudaDevice> device_;
  Mutex mutex_;
  std::map<CudaPointer, std::size_t> slots_ HVDLITE_GUARDED_BY(mutex_);  // bytes by address
  std::vector<DeviceMemory> ended_ HVDLITE_GUARDED_BY(mutex_);
  std::atomic<bool> any_ended_{false};
};

}  // namespace hvdlite
