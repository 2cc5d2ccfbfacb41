// The kernels that gpu/kernel_args.h describes. tools/make_ptx.py compiles this file alone,
// with NVRTC; the tests' fake driver compiles the same text as C++ and runs it thread by thread
// (tests/fakes/gpu/cuda/pack_bodies.cc), so that its index arithmetic is tested without a device.
#include "gpu/kernel_args.h"

namespace hvdlite {
namespace {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// The element types: what is stored, and its value as float32 or float64.

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};
using f32 = float;
using f64 = double;

#ifdef __CUDACC__
__device__ inline u32 bits_of(float value) { return __float_as_uint(value); }
__device__ inline float float_of(u32 bits) { return __uint_as_float(bits); }
__device__ inline float wide(f16 value) {
  float result;
  asm("{.reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h;}" : "=f"(result) : "h"(value.bits));
  return result;
}
__device__ inline f16 to_f16(float value) {
  f16 result;
  asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h;}" : "=h"(result.bits) : "f"(value));
  return result;
}
#else
inline u32 bits_of(float value) { return std::bit_cast<u32>(value); }
inline float float_of(u32 bits) { return std::bit_cast<float>(bits); }
inline float wide(f16 value) { return to_float(Float16{value.bits}); }
inline f16 to_f16(float value) { return {to_float16(value).bits}; }
#endif

__device__ inline float wide(bf16 value) { return float_of(static_cast<u32>(value.bits) << 16); }
__device__ inline float wide(float value) { return value; }
__device__ inline double wide(double value) { return value; }

// This rounds by hand: the instruction came with sm_80.
__device__ inline bf16 to_bf16(float value) {
  const u32 bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<u16>((bits >> 16) | 0x40)};
  return {static_cast<u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

__device__ inline void narrow(float value, f16& result) { result = to_f16(value); }
__device__ inline void narrow(float value, bf16& result) { result = to_bf16(value); }
__device__ inline void narrow(float value, float& result) { result = value; }
__device__ inline void narrow(double value, double& result) { result = value; }

// What is done with one element. The scale becomes a Factor once for each tile.

template <typename Element>
struct Copy {
  using Source = Element;
  using Target = Element;
  using Factor = float;
  static __device__ inline void apply(Source source, Factor, Target& target) { target = source; }
};

template <typename From>
struct Product {
  using Type = float;
};
template <>
struct Product<double> {
  using Type = double;
};

template <typename From, typename To>
struct Cast {
  using Source = From;
  using Target = To;
  using Factor = typename Product<From>::Type;
  static __device__ inline void apply(Source source, Factor factor, Target& target) {
    narrow(static_cast<Factor>(wide(source)) * factor, target);
  }
};

// A segment's part of one tile, moved by one block.

struct alignas(16) Vector {
  u32 words[4];
};

template <typename Element, u32 kCount>
union Chunk {
  Element elements[kCount];
  Vector vectors[sizeof(Element) * kCount / sizeof(Vector)];
  __device__ Chunk() {}
};

// A chunk is the elements whose smaller side fills one vector.
template <typename Move>
struct ChunkShape {
  using Source = typename Move::Source;
  using Target = typename Move::Target;
  static constexpr u32 kSmall = sizeof(Source) < sizeof(Target) ? sizeof(Source) : sizeof(Target);
  static constexpr u32 kElements = sizeof(Vector) / kSmall;
  static constexpr u32 kSourceVectors = kElements * sizeof(Source) / sizeof(Vector);
  static constexpr u32 kTargetVectors = kElements * sizeof(Target) / sizeof(Vector);
  // A thread has this many under way, so that their loads wait for memory together.
  static constexpr u32 kInFlight = kSourceVectors >= 4 ? 1 : 4 / kSourceVectors;
};

// The chunks `first`, `first` + blockDim.x...: kCount of them.
template <typename Move, u32 kCount>
__device__ inline void move_chunks(const Vector* in, Vector* out, u32 first,
                                   typename Move::Factor factor) {
  using Shape = ChunkShape<Move>;
  Chunk<typename Move::Source, Shape::kElements> loaded[kCount];
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) {
    const Vector* from = in + (first + i * blockDim.x) * Shape::kSourceVectors;
#pragma unroll
    for (u32 v = 0; v < Shape::kSourceVectors; ++v) loaded[i].vectors[v] = from[v];
  }
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) {
    Chunk<typename Move::Target, Shape::kElements> result;
#pragma unroll
    for (u32 e = 0; e < Shape::kElements; ++e) {
      Move::apply(loaded[i].elements[e], factor, result.elements[e]);
    }
    Vector* to = out + (first + i * blockDim.x) * Shape::kTargetVectors;
#pragma unroll
    for (u32 v = 0; v < Shape::kTargetVectors; ++v) to[v] = result.vectors[v];
  }
}

// `moved` becomes the number of elements moved: whole chunks.
template <typename Move>
__device__ inline void move_vectors(const Vector* in, Vector* out, u32 count,
                                    typename Move::Factor factor, u32& moved) {
  using Shape = ChunkShape<Move>;
  const u32 chunks = count / Shape::kElements;
  moved = chunks * Shape::kElements;
  u32 first = threadIdx.x;
  for (; first + (Shape::kInFlight - 1) * blockDim.x < chunks;
       first += Shape::kInFlight * blockDim.x) {
    move_chunks<Move, Shape::kInFlight>(in, out, first, factor);
  }
  for (; first < chunks; first += blockDim.x) {
    move_chunks<Move, 1>(in, out, first, factor);
  }
}

template <typename Move>
__device__ inline void move_tile(const CopySegment& segment, u32 tile) {
  using Source = typename Move::Source;
  using Target = typename Move::Target;
  const u64 begin = static_cast<u64>(tile) * kTileElements;
  const u64 left = segment.count - begin;
  const u32 count = left < kTileElements ? static_cast<u32>(left) : kTileElements;
  const auto factor = static_cast<typename Move::Factor>(segment.scale);
  const auto* source = reinterpret_cast<const Source*>(segment.source) + begin;
  auto* target = reinterpret_cast<Target*>(segment.target) + begin;
  u32 moved = 0;
  if (((segment.source | segment.target) % sizeof(Vector)) == 0) {
    move_vectors<Move>(reinterpret_cast<const Vector*>(source), reinterpret_cast<Vector*>(target),
                       count, factor, moved);
  }
#pragma unroll 4
  for (u32 i = moved + threadIdx.x; i < count; i += blockDim.x) {
    Move::apply(source[i], factor, target[i]);
  }
}

template <typename Move>
__device__ inline void move(const CopyArgs& args) {
  const u32 tiles = args.first_tile[args.count];
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const u32 index = segment_of(args.first_tile, args.count, tile);
    move_tile<Move>(args.segments[index], tile - args.first_tile[index]);
  }
}

using bytes_1 = unsigned char;
using bytes_2 = u16;
using bytes_4 = u32;
using bytes_8 = u64;

}  // namespace
}  // namespace hvdlite

#define HVDLITE_KERNEL(name, ...)                                                                  \
  extern "C" __global__ void name(const __grid_constant__ hvdlite::CopyArgs args) {                \
    hvdlite::move<__VA_ARGS__>(args);                                                              \
  }
#define HVDLITE_COPY(bytes)                                                                        \
  HVDLITE_KERNEL(hvdlite_copy_##bytes, hvdlite::Copy<hvdlite::bytes_##bytes>)
#define HVDLITE_CAST(source, target)                                                               \
  HVDLITE_KERNEL(hvdlite_cast_##source##_##target, hvdlite::Cast<hvdlite::source, hvdlite::target>)
HVDLITE_KERNELS(HVDLITE_COPY, HVDLITE_CAST)
