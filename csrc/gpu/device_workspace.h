// What all data planes of one device share: the device, its kernels, the fusion buffer, slots, and
// memory for gathered results. One stream orders their use. Runner only, except the pool, and the
// slots where they say so.
#pragma once

#include <memory>

#include "cuda/cuda_device.h"
#include "cuda/device_memory_pool.h"
#include "cuda/finite_words.h"
#include "cuda/segment_copies.h"
#include "gpu/device_slots.h"
#include "nccl/nccl_api.h"

namespace hvdlite {

struct DeviceWorkspace {
  std::shared_ptr<CudaDevice> device;
  std::unique_ptr<SegmentCopies> copies;
  std::shared_ptr<DeviceMemoryPool> pool;
  std::shared_ptr<DeviceSlots> slots;
  std::unique_ptr<FiniteWords> finite;
  DeviceMemory fusion;  // not valid() until reserve_fusion()

  static Result<std::unique_ptr<DeviceWorkspace>> open(std::shared_ptr<const CudaApi> cuda,
                                                       int ordinal);
  // Allocates the fusion buffer if it is not there, with NCCL's own allocator where it has one, so
  // that it can be registered. kOutOfMemory leaves the workspace as it was.
  Status reserve_fusion(const std::shared_ptr<const NcclApi>& nccl, std::size_t bytes);
};

}  // namespace hvdlite
