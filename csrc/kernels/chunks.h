// Chunk arithmetic of the data plane: pure, 64 bits wide.
//
// Words: a batch is a run of *elements*; a *chunk* is what is staged at once; a chunk is cut into
// as many *slices* as there are drivers. Cuts lie on multiples of 64 bytes from the chunk's start,
// so that no two drivers write to one cache line.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace hvdlite {

struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t count() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

inline constexpr std::uint64_t kCutBytes = 64;

// Part `index` of `parts` of a range of elements; parts are in order, disjoint, and cover the
// range.
inline Range part_of(Range whole, std::uint64_t element_bytes, std::uint64_t parts,
                     std::uint64_t index) {
  const std::uint64_t per_cut = std::max<std::uint64_t>(kCutBytes / element_bytes, 1);
  const std::uint64_t cuts = (whole.count() + per_cut - 1) / per_cut;
  const std::uint64_t share = (cuts + parts - 1) / parts * per_cut;
  const std::uint64_t begin = std::min(whole.begin + index * share, whole.end);
  return {begin, std::min(begin + share, whole.end)};
}

inline std::uint64_t chunk_count(std::uint64_t elements, std::uint64_t per_chunk) {
  return (elements + per_chunk - 1) / per_chunk;
}

inline Range chunk_at(std::uint64_t elements, std::uint64_t per_chunk, std::uint64_t index) {
  const std::uint64_t begin = std::min(index * per_chunk, elements);
  return {begin, std::min(begin + per_chunk, elements)};
}

}  // namespace hvdlite
