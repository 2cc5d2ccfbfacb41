// How the data plane cuts a batch into chunks, and chunks into slices. Pure functions of 64-bit
// numbers; any thread.
//
// Words: a batch is a run of *elements*; a *chunk* is what is staged at once; a chunk is cut into
// as many *slices* as there are drivers. Cuts lie on multiples of 64 bytes from the chunk's start,
// so that no two drivers write to one cache line.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hvdlite {

// The elements [begin, end).
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t count() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

inline constexpr std::uint64_t kCutBytes = 64;

// Returns part `index` of `parts` of a range of elements. The parts are in order, disjoint, and
// cover the range; those behind its end are empty.
inline Range part_of(Range whole, std::uint64_t element_bytes, std::uint64_t parts,
                     std::uint64_t index) {
  const std::uint64_t per_cut = std::max<std::uint64_t>(kCutBytes / element_bytes, 1);
  const std::uint64_t cuts = (whole.count() + per_cut - 1) / per_cut;
  const std::uint64_t share = (cuts + parts - 1) / parts * per_cut;
  const std::uint64_t begin = std::min(whole.begin + index * share, whole.end);
  return {begin, std::min(begin + share, whole.end)};
}

// How many chunks of `per_chunk` elements there are, and the elements of chunk `index`.
inline std::uint64_t chunk_count(std::uint64_t elements, std::uint64_t per_chunk) {
  return (elements + per_chunk - 1) / per_chunk;
}

inline Range chunk_at(std::uint64_t elements, std::uint64_t per_chunk, std::uint64_t index) {
  const std::uint64_t begin = std::min(index * per_chunk, elements);
  return {begin, std::min(begin + per_chunk, elements)};
}

}  // namespace hvdlite
