// The GPU kernels of adasum.cu as their launcher sees them, like kernel_args.h: names, parameters,
// launch shape, and what they compute. Includes nothing that needs a library.
//
// A level of the tree of collective/adasum.h has *vectors* of one type in memory, `stride` elements
// apart: pair p is a = number 2p, b = number 2p + 1. Each holds this rank's part of every tensor of
// the batch, as *segments*, cut into tiles as in kernel_args.h. Three launches serve a level:
//  - hvdlite_adasum_dots_TYPE, f32 or f64: the Dots of each tile of each pair, in float64, to
//    `partials`: pair by pair, tile by tile.
//  - hvdlite_adasum_sum: for each pair and segment the sum of its tiles' Dots, to `dots`: pair by
//    pair, tensor by tensor. Tensors without a segment here are left as they are.
//  - hvdlite_adasum_combine_TYPE: a = adasum(a, b) as collective/adasum.h says, by `dots`.
//
// Every block has kThreadsPerBlock threads, which add up in an order that depends on the lengths
// of the segments alone: any grid gives the same bits. launch_blocks() is the fast one.
#pragma once

#include "cuda/kernel_args.h"

namespace hvdlite {

inline constexpr unsigned kMaxAdasumSegments = 144;

struct AdasumSegment {
  unsigned long long begin;  // elements after the begin of a vector
  unsigned long long count;
  unsigned long long tensor;
};

// The one parameter of every kernel, by value. The addresses are the device's.
struct AdasumArgs {
  unsigned long long vectors;
  unsigned long long stride;  // elements
  unsigned long long partials;
  unsigned long long dots;
  unsigned tensors;  // of the batch
  unsigned pairs;
  unsigned count;  // of segments
  // By segment its first tile; then the number of all tiles.
  unsigned first_tile[kMaxAdasumSegments + 1];
  AdasumSegment segments[kMaxAdasumSegments];
};
static_assert(sizeof(AdasumSegment) == 24 && sizeof(AdasumArgs) == 4080,
              "one layout for both compilers, below the 4096 bytes that a kernel may take");

// False when the table is full. `count` is at most 2^40.
constexpr bool add(AdasumArgs& args, const AdasumSegment& segment) {
  if (args.count == kMaxAdasumSegments) return false;
  args.segments[args.count] = segment;
  args.first_tile[args.count + 1] = args.first_tile[args.count] + tiles_of(segment.count);
  ++args.count;
  return true;
}

// How many blocks to launch for `items`: tiles, or segments, of all pairs.
constexpr unsigned launch_blocks(unsigned long long items, unsigned processors) {
  const unsigned long long most = processors * kBlocksPerProcessor;
  return static_cast<unsigned>(items < most ? items : most);
}

}  // namespace hvdlite

// Every kernel, for whoever makes a table of them: TYPED(name, element type), PLAIN(name).
#define HVDLITE_ADASUM_KERNELS(TYPED, PLAIN)                                                       \
  TYPED(dots, f32) TYPED(dots, f64) TYPED(combine, f32) TYPED(combine, f64) PLAIN(sum)
