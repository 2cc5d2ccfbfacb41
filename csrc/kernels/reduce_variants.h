// The compiled variants of reduce_loops.inc, for reduce.cc and its test alone.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "kernels/reduce.h"

namespace hvdlite {

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
