// Compiles csrc/cuda/kernels/adasum.cu as C++ and runs it block by block: its threads go in steps.
#include "cuda/builtins.h"
#include "cuda/cuda_abi.h"
#include "cuda/kernel_bodies.h"
// clang-format off: after what it needs.
#include "cuda/kernels/adasum.cu"
// clang-format on

namespace fakegpu {
namespace {

// Replaces the device addresses by those of the streams' mapping. False: one is not the device's.
bool to_aliases(hvdlite::AdasumArgs& args, int device, std::size_t element_bytes) {
  const auto alias = [device](unsigned long long& address, std::size_t bytes, std::size_t unit) {
    void* pointer = fake_resolve(device, reinterpret_cast<const void*>(address), bytes);
    if (address % unit != 0) return false;
    address = reinterpret_cast<std::uintptr_t>(pointer);
    return pointer != nullptr;
  };
  constexpr std::size_t kDots = sizeof(hvdlite::Dots);
  if (args.count == 0 || args.count > hvdlite::kMaxAdasumSegments || args.pairs == 0) return false;
  unsigned long long end = 0;  // of a vector
  for (unsigned i = 0; i < args.count; ++i) {
    const hvdlite::AdasumSegment& segment = args.segments[i];
    if (segment.begin < end || segment.tensor >= args.tensors) return false;
    end = segment.begin + segment.count;
  }
  if (end > args.stride) return false;  // vectors overlap
  const std::size_t tiles = args.first_tile[args.count];
  return alias(args.vectors, ((2 * args.pairs - 1) * args.stride + end) * element_bytes,
               element_bytes) &&
         alias(args.partials, tiles * args.pairs * kDots, sizeof(double)) &&
         alias(args.dots, std::size_t{args.tensors} * args.pairs * kDots, sizeof(double));
}

int run(void (*kernel)(hvdlite::AdasumArgs), const void* params, const FakeLaunch& launch,
        std::size_t element_bytes) {
  auto args = *static_cast<const hvdlite::AdasumArgs*>(params);
  if (launch.block[0] != hvdlite::kThreadsPerBlock) return CUDA_ERROR_INVALID_VALUE;
  if (!to_aliases(args, launch.device, element_bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  gridDim.x = launch.grid[0];
  blockDim.x = launch.block[0];
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) kernel(args);
  return CUDA_SUCCESS;
}

}  // namespace

#define FAKE_BODY(name, bytes)                                                                     \
  int run_hvdlite_##name(const void* params, const FakeLaunch* launch) {                           \
    return run(&hvdlite_##name, params, *launch, bytes);                                           \
  }
#define FAKE_TYPED(name, type) FAKE_BODY(adasum_##name##_##type, sizeof(hvdlite::type))
#define FAKE_PLAIN(name) FAKE_BODY(adasum_##name, sizeof(float))
HVDLITE_ADASUM_KERNELS(FAKE_TYPED, FAKE_PLAIN)

}  // namespace fakegpu
