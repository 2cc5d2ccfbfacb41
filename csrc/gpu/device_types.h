// Decides which reductions run on a device: GPU kernels and NCCL do not know all element types and
// factors. Complex numbers are reduced as twice as many floats, and the rest goes through the host.
// Pure functions, which give the same result on every member of a group.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "kernels/pieces.h"
#include "transport/topology.h"

namespace hvdlite {

// True when a reduction runs on the device, false when it goes through the host.
inline bool runs_on_device(const Group& group, ElementTypes types, ReduceOp op,
                           std::span<const Piece> pieces) {
  const DataType dtype = types.memory;
  if (is_complex(dtype)) return op == ReduceOp::kSum || op == ReduceOp::kAverage;
  if (is_floating(dtype)) return !types.cast() || dtype != DataType::kFloat64;
  if (op == ReduceOp::kAverage && group.average_over > 0) return false;
  const auto scaled = [](const Piece& piece) {
    return piece.prescale != 1.0 || piece.postscale != 1.0;
  };
  return size_of(dtype) != 2 && std::none_of(pieces.begin(), pieces.end(), scaled);
}

// Turns pieces of complex numbers into pieces of their real and imaginary parts.
inline std::vector<Piece> parts_of_complex(std::span<const Piece> pieces) {
  std::vector<Piece> parts(pieces.begin(), pieces.end());
  for (Piece& piece : parts) piece.count *= 2;
  return parts;
}

// Turns an average by group.divisor() into a sum of scaled values, because NCCL's own average
// divides by the number of ranks. Floats only.
inline std::vector<Piece> shares(const Group& group, std::span<const Piece> pieces) {
  std::vector<Piece> shares(pieces.begin(), pieces.end());
  for (Piece& piece : shares) piece.prescale /= group.divisor();
  return shares;
}

}  // namespace hvdlite
