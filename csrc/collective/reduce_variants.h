// The compiled variants of reduce_loops.inc, for reduce.cc and its test alone.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "collective/reduce.h"

namespace hvdlite {

using ReduceFunction = void (*)(DataType, ReduceOp, std::span<const void* const>, void*,
                                std::size_t, const Finish&);

namespace portable {
void reduce_any(DataType dtype, ReduceOp op, std::span<const void* const> sources,
                void* destination, std::size_t count, const Finish& finish);
}
namespace avx2 {
// Defined on x86-64 only; called only where the processor has AVX2 and F16C.
void reduce_any(DataType dtype, ReduceOp op, std::span<const void* const> sources,
                void* destination, std::size_t count, const Finish& finish);
}  // namespace avx2

// The variant for this processor.
ReduceFunction best_reduce();

}  // namespace hvdlite
