// The state that all data planes of one device share: the device, its kernels, the fusion buffer,
// gradient memory, and memory for gathered results. GpuPlane owns it. The device's one
// communication stream orders all use. Runner only, except the pool and the gradient memory, which
// say which of their calls any thread may make.
#pragma once

#include <memory>

#include "gpu/cuda_device.h"
#include "gpu/device_memory_pool.h"
#include "gpu/gradient_memory.h"
#include "gpu/nccl_api.h"
#include "gpu/segment_copies.h"

namespace hvdlite {

struct DeviceWorkspace {
  std::shared_ptr<CudaDevice> device;
  std::unique_ptr<SegmentCopies> copies;
  std::shared_ptr<DeviceMemoryPool> pool;  // Results lie in it.
  std::shared_ptr<DeviceMemoryPool> kept;  // The inputs that an elastic job keeps lie in it.
  std::shared_ptr<GradientMemory> gradients;
  DeviceMemory fusion;  // not valid() until reserve_fusion()

  static Result<std::unique_ptr<DeviceWorkspace>> open(std::shared_ptr<const CudaApi> cuda,
                                                       int ordinal);
  // Allocates the fusion buffer if there is none, with NCCL's own allocator where NCCL has one, so
  // that the buffer can be registered. kOutOfMemory leaves the workspace as it was.
  Status reserve_fusion(const std::shared_ptr<const NcclApi>& nccl, std::size_t bytes);
};

}  // namespace hvdlite
