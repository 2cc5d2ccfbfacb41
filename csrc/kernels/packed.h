// Floating-point numbers as small integers, for links that are slow. 256 numbers that follow each
// other are a *block*, the last one may be shorter. A packed block is a float32, its *scale*, and
// an int8 for each number: the number is the product of both. The scale is the largest magnitude of
// the block divided by 127, so no number is off by more than half of it.
//
// A block with an infinity or NaN is NaN as a whole, and so is what is summed with it. A block of
// magnitudes below 2^-119 alone is zeros, because float32 has no exact scale for it.
//
// Pure functions of memory; any thread. float32, float16 and bfloat16 can be packed, by way of
// float32. Every processor unpacks the same bytes to the same bits, also one that treats subnormal
// numbers as zeros.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "kernels/reduce.h"

namespace hvdlite {

inline constexpr std::size_t kPackedBlock = 256;  // numbers

constexpr bool can_be_packed(DataType dtype) {
  return dtype == DataType::kFloat32 || dtype == DataType::kFloat16 || dtype == DataType::kBfloat16;
}

// The bytes that `count` numbers take.
constexpr std::size_t packed_bytes(std::size_t count) {
  return count + (count + kPackedBlock - 1) / kPackedBlock * sizeof(float);
}

// `to` has room for packed_bytes(count), and does not overlap the numbers.
void pack(DataType dtype, const void* from, std::size_t count, std::byte* to);
void unpack(DataType dtype, const std::byte* from, std::size_t count, void* to);

// Sums the packed numbers of all sources in float32, source 0 first, ascending; finishes them as
// reduce() does, and packs them; no tree is read. There is at least one source; `to` may be one of
// them.
void sum_packed(std::span<const std::byte* const> sources, std::size_t count, const Finish& finish,
                std::byte* to);

}  // namespace hvdlite
