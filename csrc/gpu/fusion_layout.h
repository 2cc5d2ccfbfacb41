// The layout of a batch's tensors in a fusion buffer, or in gradient memory: pure arithmetic, the
// same on every rank.
//
// Every tensor begins at a multiple of 16 bytes, so that copies move 16 bytes at a time. The bytes
// between tensors are reduced like the rest, and have no meaning. Tensors that do not fit into the
// buffer continue in another *round*, which uses the buffer again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/pieces.h"

namespace hvdlite {

inline constexpr std::uint64_t kFusionAlign = 16;

// The next multiple of `unit`, or the value itself.
constexpr std::uint64_t aligned(std::uint64_t value, std::uint64_t unit = kFusionAlign) {
  return (value + unit - 1) / unit * unit;
}

struct FusedPart {
  std::size_t piece = 0;     // index
  std::uint64_t begin = 0;   // the first of the piece's elements that is here
  std::uint64_t count = 0;   // elements
  std::uint64_t offset = 0;  // in the buffer, bytes
};
struct FusedRound {
  std::vector<FusedPart> parts;
  std::uint64_t bytes = 0;  // So many of the buffer are used, in whole elements.
};

// Lays out the pieces. `element_bytes` is the size of an element in the buffer, at most 8;
// `capacity` is the size of the buffer in bytes, at least 16.
inline std::vector<FusedRound> lay_out(std::span<const Piece> pieces, std::size_t element_bytes,
                                       std::uint64_t capacity) {
  std::vector<FusedRound> rounds(1);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    for (std::uint64_t begin = 0; begin < pieces[i].count;) {
      const std::uint64_t offset = aligned(rounds.back().bytes);
      if (offset + element_bytes > capacity) {
        rounds.emplace_back();
        continue;
      }
      const std::uint64_t room = (capacity - offset) / element_bytes;
      const std::uint64_t count = std::min<std::uint64_t>(pieces[i].count - begin, room);
      rounds.back().parts.push_back({i, begin, count, offset});
      rounds.back().bytes = offset + count * element_bytes;
      begin += count;
    }
  }
  return rounds;
}

}  // namespace hvdlite
