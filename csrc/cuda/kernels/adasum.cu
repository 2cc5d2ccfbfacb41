// The kernels that backend/adasum_args.h describes. tools/make_ptx.py compiles this file alone,
// with NVRTC; the test double of the driver compiles the same text as C++ and runs it block by
// block (tests/fakes/gpu/cuda/adasum_bodies.cc).
//
// The threads of a block work together in *steps*: HVDLITE_STEP is what each of them does, and ends
// with a barrier. On a device a thread comes to the end of a step and waits; the double runs a step
// for one thread after the other. So a variable outside of the steps is the same for all threads.
#include "cuda/adasum_args.h"

#ifdef __CUDACC__
#define HVDLITE_STEP for (bool first = true; first; first = false, __syncthreads())
#else
#define HVDLITE_STEP for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
#endif

namespace hvdlite {
namespace {

using u32 = unsigned int;
using u64 = unsigned long long;
using f32 = float;
using f64 = double;

struct Dots {
  double aa;
  double bb;
  double ab;
};

__device__ inline void add_to(Dots& sum, const Dots& other) {
  sum.aa += other.aa;
  sum.bb += other.bb;
  sum.ab += other.ab;
}

// One tile of one pair.
template <typename Element>
struct Tile {
  Element* __restrict__ a;
  const Element* __restrict__ b;
  u32 count;
  u64 dots;  // index of the pair's tensor

  __device__ Tile(const AdasumArgs& args, u64 item) {
    const u32 tiles = args.first_tile[args.count];
    const u64 pair = item / tiles;
    const u32 tile = static_cast<u32>(item % tiles);
    const u32 index = segment_of(args.first_tile, args.count, tile);
    const AdasumSegment& segment = args.segments[index];
    const u64 begin = static_cast<u64>(tile - args.first_tile[index]) * kTileElements;
    const u64 left = segment.count - begin;
    a = reinterpret_cast<Element*>(args.vectors) + 2 * pair * args.stride + segment.begin + begin;
    b = a + args.stride;
    count = left < kTileElements ? static_cast<u32>(left) : kTileElements;
    dots = pair * args.tensors + segment.tensor;
  }
};

// The tiles, or segments, that a block takes in turn.
template <typename Body>
__device__ inline void for_each_item(u64 items, const Body& body) {
  for (u64 item = blockIdx.x; item < items; item += gridDim.x) body(item);
}

// Adds all up into the first one.
__device__ inline void add_up(Dots* sums) {
  for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
    HVDLITE_STEP {
      if (threadIdx.x < half) add_to(sums[threadIdx.x], sums[threadIdx.x + half]);
    }
  }
}

template <typename Element>
__device__ inline void dots(const AdasumArgs& args) {
  __shared__ Dots sums[kThreadsPerBlock];
  auto* partials = reinterpret_cast<Dots*>(args.partials);
  const u64 items = static_cast<u64>(args.first_tile[args.count]) * args.pairs;
  for_each_item(items, [&](u64 item) {
    const Tile<Element> tile(args, item);
    HVDLITE_STEP {
      Dots sum{0, 0, 0};
#pragma unroll 8
      for (u32 i = threadIdx.x; i < tile.count; i += blockDim.x) {
        const double x = tile.a[i];
        const double y = tile.b[i];
        add_to(sum, {x * x, y * y, x * y});
      }
      sums[threadIdx.x] = sum;
    }
    add_up(sums);
    HVDLITE_STEP {
      if (threadIdx.x == 0) partials[item] = sums[0];
    }
  });
}

__device__ inline void sum(const AdasumArgs& args) {
  __shared__ Dots sums[kThreadsPerBlock];
  const u32 tiles = args.first_tile[args.count];
  for_each_item(static_cast<u64>(args.count) * args.pairs, [&](u64 item) {
    const u64 pair = item / args.count;
    const u32 index = static_cast<u32>(item % args.count);
    const auto* partials = reinterpret_cast<const Dots*>(args.partials) + pair * tiles;
    auto* result = reinterpret_cast<Dots*>(args.dots) + pair * args.tensors;
    HVDLITE_STEP {
      Dots sum{0, 0, 0};
      const u32 end = args.first_tile[index + 1];
      for (u32 tile = args.first_tile[index] + threadIdx.x; tile < end; tile += blockDim.x) {
        add_to(sum, partials[tile]);
      }
      sums[threadIdx.x] = sum;
    }
    add_up(sums);
    HVDLITE_STEP {
      if (threadIdx.x == 0) result[args.segments[index].tensor] = sums[0];
    }
  });
}

template <typename Element>
__device__ inline void combine(const AdasumArgs& args) {
  const u64 items = static_cast<u64>(args.first_tile[args.count]) * args.pairs;
  for_each_item(items, [&](u64 item) {
    const Tile<Element> tile(args, item);
    const Dots dots = reinterpret_cast<const Dots*>(args.dots)[tile.dots];
    const double of_a = dots.aa == 0 ? 1.0 : 1.0 - dots.ab / (2 * dots.aa);
    const double of_b = dots.bb == 0 ? 1.0 : 1.0 - dots.ab / (2 * dots.bb);
    HVDLITE_STEP {
#pragma unroll 8
      for (u32 i = threadIdx.x; i < tile.count; i += blockDim.x) {
        tile.a[i] = static_cast<Element>(of_a * tile.a[i] + of_b * tile.b[i]);
      }
    }
  });
}

}  // namespace
}  // namespace hvdlite

#define HVDLITE_ADASUM_KERNEL(name, ...)                                                           \
  extern "C" __global__ void hvdlite_adasum_##name(                                                \
      const __grid_constant__ hvdlite::AdasumArgs args) {                                          \
    hvdlite::__VA_ARGS__(args);                                                                    \
  }
#define HVDLITE_ADASUM_TYPED(name, type)                                                           \
  HVDLITE_ADASUM_KERNEL(name##_##type, name<hvdlite::type>)
#define HVDLITE_ADASUM_PLAIN(name) HVDLITE_ADASUM_KERNEL(name, name)
HVDLITE_ADASUM_KERNELS(HVDLITE_ADASUM_TYPED, HVDLITE_ADASUM_PLAIN)
