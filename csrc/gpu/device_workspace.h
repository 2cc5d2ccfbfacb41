// What all data planes of one device share, and how it lies in memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "gpu/cuda_device.h"
#include "gpu/kernels.h"
#include "gpu/nccl_api.h"
#include "kernels/pieces.h"

namespace hvdlite {

// The layout of a batch's tensors in a fusion buffer, or in gradient memory: pure arithmetic, the
// same on every rank.
//
// Every tensor begins at a multiple of 16 bytes, so that copies move 16 bytes at a time. The bytes
// between tensors are reduced like the rest, and have no meaning. Tensors that do not fit into the
// buffer continue in another *round*, which uses the buffer again.
inline constexpr std::uint64_t kFusionAlign = 16;

// The next multiple of `unit`, or the value itself.
constexpr std::uint64_t aligned(std::uint64_t value, std::uint64_t unit = kFusionAlign) {
  return (value + unit - 1) / unit * unit;
}

struct FusedPart {
  std::size_t piece = 0;     // index
  std::uint64_t begin = 0;   // the first of the piece's elements that is here
  std::uint64_t count = 0;   // elements
  std::uint64_t offset = 0;  // in the buffer, bytes
};
struct FusedRound {
  std::vector<FusedPart> parts;
  std::uint64_t bytes = 0;  // So many of the buffer are used, in whole elements.
};

// Lays out the pieces. `element_bytes` is the size of an element in the buffer, at most 8;
// `capacity` is the size of the buffer in bytes, at least 16.
inline std::vector<FusedRound> lay_out(std::span<const Piece> pieces, std::size_t element_bytes,
                                       std::uint64_t capacity) {
  std::vector<FusedRound> rounds(1);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    for (std::uint64_t begin = 0; begin < pieces[i].count;) {
      const std::uint64_t offset = aligned(rounds.back().bytes);
      if (offset + element_bytes > capacity) {
        rounds.emplace_back();
        continue;
      }
      const std::uint64_t room = (capacity - offset) / element_bytes;
      const std::uint64_t count = std::min<std::uint64_t>(pieces[i].count - begin, room);
      rounds.back().parts.push_back({i, begin, count, offset});
      rounds.back().bytes = offset + count * element_bytes;
      begin += count;
    }
  }
  return rounds;
}

// Allocates memory of `device` that NCCL can register, if this NCCL can register memory; plain
// memory otherwise, and when `nccl` is null. kOutOfMemory names the size.
Result<DeviceMemory> allocate_for_nccl(const std::shared_ptr<CudaDevice>& device,
                                       const std::shared_ptr<const NcclApi>& nccl,
                                       std::size_t bytes);

// Gradient memory: device memory in which the gradients of buckets live from step to step
// (hvdlite/torch/bucket_memory.py). An *area* is one allocation of it. A framework
// holds an area, and gives parts of it as outputs of collectives. A data plane that finds a batch's
// outputs in one area, in the order and with the gaps of lay_out(), reduces them there, and
// registers the area with NCCL at the first use.
//
// An area ends when its last holder lets go of it. That waits for the device, because streams that
// the core does not know may still read the area. The runner frees the memory later, once the data
// planes have forgotten it. A holder may outlive the engine. Threads: any thread may call
// allocate() and let go of an area; everything else is for the runner.
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
  // The memory of the areas that have ended. The caller frees it when no data plane knows it any
  // more.
  std::vector<DeviceMemory> take_ended();

 private:
  void end(DeviceMemory memory);

  const std::shared_ptr<CudaDevice> device_;
  Mutex mutex_;
  std::map<CudaPointer, std::size_t> areas_ HVDLITE_GUARDED_BY(mutex_);  // bytes by address
  std::vector<DeviceMemory> ended_ HVDLITE_GUARDED_BY(mutex_);
};

// The state that all data planes of one device share: the device, its kernels, the fusion buffer,
// gradient memory, and memory for gathered results. GpuPlane owns it. The device's one
// communication stream orders all use. Runner only, except the pool and the gradient memory, which
// say which of their calls any thread may make.
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
