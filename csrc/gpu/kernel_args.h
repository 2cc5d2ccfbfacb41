// The GPU kernels of pack.cu as their launcher sees them: names, parameters, launch shape and
// results. This file includes nothing, because the compiler of pack.cu has no headers.
//
// A kernel moves *segments*: `count` elements from `source` to `target`, each times `scale`. To
// pack a batch, sources are tensors and targets are places in a fusion buffer; to unpack, the
// reverse; to scale in place, both are the same. A segment is cut into *tiles* of kTileElements,
// and each block takes every n-th tile, so that many small tensors and few large ones both keep the
// device busy.
//
// One kernel serves one pair of types, one launch up to kMaxSegments segments:
//  - hvdlite_copy_1, _2, _4, _8: elements of that many bytes, bit by bit; `scale` is ignored. For
//    every type where nothing is to be computed.
//  - hvdlite_cast_SOURCE_TARGET with f16, bf16, f32, f64: scaled, and cast between f32 and a 16-bit
//    type, or to the same type. For f64 the product is taken in float64 with the whole scale; else
//    in float32 with the scale rounded to float32. The product is rounded to the target's type to
//    nearest even. Subnormals are kept; what is too large becomes infinite; a NaN
//    stays a NaN with unspecified bits.
//
// Sources and targets are device addresses that are multiples of their element's size. A segment
// whose two addresses are multiples of 16 moves in 16-byte accesses, others element by element. A
// target overlaps no source, other than being the same address with the same type.
// Any grid and any block of up to 1024 threads gives the same result; launch_blocks() is the fast
// one.
#pragma once

namespace hvdlite {

inline constexpr unsigned kMaxSegments = 112;
inline constexpr unsigned kTileElements = 4096;
inline constexpr unsigned kThreadsPerBlock = 256;
inline constexpr unsigned kBlocksPerProcessor = 8;

struct CopySegment {
  unsigned long long source;
  unsigned long long target;
  unsigned long long count;
  double scale;
};

// The one parameter of every kernel, by value. Made by clear() and add().
struct CopyArgs {
  unsigned count;  // There are so many segments.
  // Each segment has its first tile here; then the number of all tiles follows.
  unsigned first_tile[kMaxSegments + 1];
  CopySegment segments[kMaxSegments];
};
static_assert(sizeof(CopySegment) == 32 && sizeof(CopyArgs) == 4040,
              "one layout for both compilers, below the 4096 bytes that a kernel may take");

constexpr unsigned tiles_of(unsigned long long elements) {
  return static_cast<unsigned>((elements + kTileElements - 1) / kTileElements);
}

// The segment that holds `tile`: the last one that does not begin after it. Segments without
// elements have no tile.
constexpr unsigned segment_of(const unsigned* first_tile, unsigned segments, unsigned tile) {
  unsigned low = 0;
  unsigned high = segments;
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    (first_tile[middle] <= tile ? low : high) = middle;
  }
  return low;
}

constexpr void clear(CopyArgs& args) {
  args.count = 0;
  args.first_tile[0] = 0;
}

// False when the table is full: launch, clear, and add again. `count` is at most 2^40.
constexpr bool add(CopyArgs& args, const CopySegment& segment) {
  if (args.count == kMaxSegments) return false;
  args.segments[args.count] = segment;
  args.first_tile[args.count + 1] = args.first_tile[args.count] + tiles_of(segment.count);
  ++args.count;
  return true;
}

// How many blocks of kThreadsPerBlock to launch; 0: there is nothing to move.
constexpr unsigned launch_blocks(const CopyArgs& args, unsigned processors) {
  const unsigned tiles = args.first_tile[args.count];
  const unsigned most = processors * kBlocksPerProcessor;
  return tiles < most ? tiles : most;
}

}  // namespace hvdlite

// All kernels, for code that makes a table of them: COPY(bytes of an element), CAST(source,
// target).
// clang-format off: one row for each type.
#define HVDLITE_KERNELS(COPY, CAST)                                                                \
  COPY(1) COPY(2) COPY(4) COPY(8)                                                                  \
  CAST(f16, f16) CAST(f16, f32)                                                                    \
  CAST(bf16, bf16) CAST(bf16, f32)                                                                 \
  CAST(f32, f32) CAST(f32, f16) CAST(f32, bf16)                                                    \
  CAST(f64, f64)
// clang-format on
