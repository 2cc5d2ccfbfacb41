// Weighted sums of gradients that come late, in float64 for float64 tensors and in float32 for all
// other floating-point types. Pure functions; any thread.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hvdlite {

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

}  // namespace hvdlite
