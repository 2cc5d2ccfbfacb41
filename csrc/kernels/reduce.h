// Elementwise reduction of several buffers into one, and copies. Pure functions of memory; any
// thread. Buffers need not be aligned: loads and stores go through memcpy.
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

// Weighted sums of gradients that come late, in float64 for float64 tensors and in float32 for all
// other floating-point types.

// Bytes of one element of the sum.
constexpr std::size_t fold_size_of(DataType dtype) {
  return dtype == DataType::kFloat64 ? sizeof(double) : sizeof(float);
}

// sum[i] += weight * from[i]. `dtype`, floating-point, is that of `from`.
void fold_in(DataType dtype, void* sum, const void* from, std::size_t count, double weight);

// to[i] = (sum[i] + weight * from[i]) / total. `dtype` is that of `from` and `to`, which may be the
// same memory; a weight of 0 reads nothing from `from`.
void fold_out(DataType dtype, const void* sum, const void* from, void* to, std::size_t count,
              double weight, double total);

// Copies as memcpy does, to memory that nobody reads soon. On x86-64 the stores go past the caches:
// so the destination is not read from memory first, and pushes nothing out of the caches. Other
// threads see the copy as they see any earlier write of the caller.
void stream_copy(const void* source, void* destination, std::size_t bytes);

// The rest is for reduce.cc, reduce_avx2.cc and their test alone: the compiled variants
// of reduce_loops.inc.
using ReduceFunction = void (*)(DataType, ReduceOp, std::span<const void* const>, void*,
                                std::size_t, const Finish&);
// scale_copy() between different floating-point types.
using CastFunction = void (*)(ElementTypes, const void*, void*, std::size_t, double);

namespace portable {
void reduce_any(DataType dtype, ReduceOp op, std::span<const void* const> sources,
                void* destination, std::size_t count, const Finish& finish);
void cast_any(ElementTypes types, const void* source, void* destination, std::size_t count,
              double factor);
}  // namespace portable
namespace avx2 {
// Defined on x86-64 only; called only where the processor has AVX2 and F16C.
void reduce_any(DataType dtype, ReduceOp op, std::span<const void* const> sources,
                void* destination, std::size_t count, const Finish& finish);
void cast_any(ElementTypes types, const void* source, void* destination, std::size_t count,
              double factor);
}  // namespace avx2

// Says what was asked for and aborts the process. The engine refuses such calls before they get
// here: a result all the same would be a wrong number on every rank.
[[noreturn]] void no_such_reduction(DataType dtype, ReduceOp op);

// The variants for this processor.
ReduceFunction best_reduce();
CastFunction best_cast();

}  // namespace hvdlite
