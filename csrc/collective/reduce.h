// Elementwise reduction of several buffers into one, and scaled copies. Pure functions of memory;
// any thread. Buffers need no alignment beyond their element's own address being readable: loads
// and stores go through memcpy where the compiler must assume nothing.
//
// Order: source 0 first, ascending. 16-bit floats accumulate in float32 and round once; other types
// accumulate in themselves; integers wrap around. Min and max let a NaN through. The loops are
// compiled twice, portable and for AVX2, and chosen once by the processor: the bits are the same.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"

namespace hvdlite {

// What happens to the accumulated value before it is rounded and stored.
struct Finish {
  int divisor = 1;      // of an average; integers divide towards zero
  double factor = 1.0;  // floating-point types only
};

// destination[i] = finish(op over all sources of source[i]). `destination` may be one of the
// sources; it overlaps none of them otherwise. At least one source.
void reduce(DataType dtype, ReduceOp op, std::span<const void* const> sources, void* destination,
            std::size_t count, const Finish& finish);

// destination[i] = factor * source[i], from types.memory to types.wire, which are the same, or both
// floating-point. A plain copy for one type and a factor of 1, or integers. The product is taken in
// float64 if one type is, else in float32; from float64 to a 16-bit type it is rounded by way of
// float32, as frameworks do. `destination` may be the source where the types are the same.
void scale_copy(ElementTypes types, const void* source, void* destination, std::size_t count,
                double factor);

}  // namespace hvdlite
