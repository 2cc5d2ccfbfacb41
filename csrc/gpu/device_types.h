// Element types and factors that a GPU's kernels and NCCL do not know: complex numbers are reduced
// as twice as many floats, and the rest goes through the host. Pure; every member of a group comes
// to the same decision.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "kernels/pieces.h"
#include "transport/topology.h"

namespace hvdlite {

// Whether a reduction runs on the device.
inline bool runs_on_device(const Group& group, DataType dtype, ReduceOp op,
                           std::span<const Piece> pieces) {
  if (is_complex(dtype)) return op == ReduceOp::kSum || op == ReduceOp::kAverage;
  if (is_floating(dtype)) return true;
  if (op == ReduceOp::kAverage && group.average_over > 0) return false;
  const auto scaled = [](const Piece& piece) {
    return piece.prescale != 1.0 || piece.postscale != 1.0;
  };
  return dtype != DataType::kUint16 && std::none_of(pieces.begin(), pieces.end(), scaled);
}

// Pieces of complex numbers as those of their parts.
inline std::vector<Piece> parts_of_complex(std::span<const Piece> pieces) {
  std::vector<Piece> parts(pieces.begin(), pieces.end());
  for (Piece& piece : parts) piece.count *= 2;
  return parts;
}

// Averages by group.divisor() of floats as NCCL makes its own, which divide by the number of ranks:
// as sums of scaled values.
inline std::vector<Piece> shares(const Group& group, std::span<const Piece> pieces) {
  std::vector<Piece> shares(pieces.begin(), pieces.end());
  for (Piece& piece : shares) piece.prescale /= group.divisor();
  return shares;
}

}  // namespace hvdlite
