// Elementwise reduction of several buffers into one, and scaled copies. Pure functions of memory;
// any thread. Buffers need not be aligned: loads and stores go through memcpy.
//
// Order: the sources are combined by a binary tree (sum_tree.h), which halves them if no other one
// is given. 16-bit floats accumulate in float32 and round once; other types accumulate in
// themselves; integer sums and products wrap around. Min and max let a NaN through; complex numbers
// have neither min nor max. A factor times an integer is taken in float64 and cut towards zero, and
// beyond the type's range it is the nearest value of the range: so integers of more than 53 bits
// are exact with a factor of 1 only. The loops are compiled twice, portable and for AVX2, and
// chosen once by the processor: the bits are the same.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"

namespace hvdlite {

// What happens to the accumulated value before it is rounded and stored.
struct Finish {
  int divisor = 1;      // An average divides by it; integers divide towards zero.
  double factor = 1.0;  // after the division
  // For sums and averages of 16-bit floats alone: source i is a mean of counts[i] values, and
  // counts as often. Where it is null, each source counts once.
  const int* counts = nullptr;
  // The tree over the sources, as tree_over_hosts() has it; null: each node halves them.
  const int* nodes = nullptr;
};

// Sets destination[i] = finish(op over all sources of source[i]). There is at least one source.
// `destination` may be one of them, and does not overlap them otherwise. A type that does not
// compute(), kAdasum, and the min or max of complex numbers abort the process: callers refuse them.
void reduce(DataType dtype, ReduceOp op, std::span<const void* const> sources, void* destination,
            std::size_t count, const Finish& finish);

// Sets destination[i] = factor * source[i], from types.memory to types.wire, which are the same, or
// both floating-point. With one type and a factor of 1 it is a plain copy. The product is taken as
// by reduce(), of two types in float64 if one is, else in float32; from float64 to a 16-bit type it
// is rounded by way of float32, as frameworks do. `destination` may be the source where the types
// are the same.
void scale_copy(ElementTypes types, const void* source, void* destination, std::size_t count,
                double factor);

}  // namespace hvdlite
