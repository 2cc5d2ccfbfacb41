// Compiles csrc/gpu/pack.cu as C++ and runs it one thread after the other: its kernels
// have no barriers, so the order does not matter.
#include <bit>

#include "base/dtype.h"
#include "cuda/cuda_abi.h"
#include "cuda/kernel_bodies.h"

// The names that CUDA has built in and that pack.cu uses. A launch runs on one thread of the host,
// which sets the indices.
struct Index {
  unsigned x;
};
static thread_local Index threadIdx;
static thread_local Index blockIdx;
static thread_local Index blockDim;
static thread_local Index gridDim;
#define __device__
#define __global__
#define __grid_constant__

#include "gpu/pack.cu"

namespace fakegpu {
namespace {

// Replaces the device addresses by their aliases. False when one is not memory of the device.
bool to_aliases(hvdlite::CopyArgs& args, int device, std::size_t source_bytes,
                std::size_t target_bytes) {
  const auto alias = [device](unsigned long long& address, std::size_t bytes) {
    void* pointer = fake_resolve(device, reinterpret_cast<const void*>(address), bytes);
    address = reinterpret_cast<std::uintptr_t>(pointer);
    return pointer != nullptr;
  };
  if (args.count > hvdlite::kMaxSegments) return false;
  for (unsigned i = 0; i < args.count; ++i) {
    hvdlite::CopySegment& segment = args.segments[i];
    if (segment.count == 0) continue;
    if (!alias(segment.source, segment.count * source_bytes)) return false;
    if (!alias(segment.target, segment.count * target_bytes)) return false;
    if (segment.source % source_bytes != 0 || segment.target % target_bytes != 0) return false;
  }
  return true;
}

template <void (*kernel)(hvdlite::CopyArgs), std::size_t source_bytes, std::size_t target_bytes>
int run(hvdlite::CopyArgs args, const FakeLaunch& launch) {
  if (!to_aliases(args, launch.device, source_bytes, target_bytes)) {
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  gridDim.x = launch.blocks;
  blockDim.x = launch.threads;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) kernel(args);
  }
  return CUDA_SUCCESS;
}

}  // namespace

const std::map<std::string, Kernel>& core_kernels() {
#define FAKE_ROW(name, source_bytes, target_bytes)                                                 \
  {"hvdlite_" #name, Kernel{&run<&hvdlite_##name, source_bytes, target_bytes>}},
#define FAKE_COPY(bytes) FAKE_ROW(copy_##bytes, bytes, bytes)
#define FAKE_CAST(source, target)                                                                  \
  FAKE_ROW(cast_##source##_##target, sizeof(hvdlite::source), sizeof(hvdlite::target))
  static const auto* all = new std::map<std::string, Kernel>{HVDLITE_KERNELS(FAKE_COPY, FAKE_CAST)};
  return *all;
}

}  // namespace fakegpu
