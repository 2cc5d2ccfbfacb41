// A batch as the data plane sees it: how it is cut into chunks, and chunks into slices, and the
// tensors that it consists of.
//
// Words: a batch is a run of *elements*; a *chunk* is what is staged at once; a chunk is cut into
// as many *slices* as there are drivers. Cuts lie on multiples of 64 bytes from the chunk's start,
// so that no two drivers write to one cache line.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"

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

// A copy of a piece's input, made before the output overwrites the input.
struct InputCopy {
  std::byte* to = nullptr;  // as long as the input
  std::uint64_t bytes = 0;  // copied so far, from the start
};

// One tensor. `input` may equal `output`; otherwise the two do not overlap. Both are borrowed.
struct Piece {
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;      // elements, may be 0
  double prescale = 1.0;      // factor on this rank's input
  double postscale = 1.0;     // factor on the result, after the division of an average
  bool own_scale = false;     // the prescale is this rank's alone: other ranks may have another one
  InputCopy* copy = nullptr;  // where the plane shall make one (Backend::copies_inputs)
};

// The tensors of a batch as one run of elements, numbered from 0 across tensors. The list borrows
// the pieces, and they their memory, until the next assign(); it keeps its capacity between
// batches. Thread: the engine's runner.
class PieceList {
 public:
  void assign(std::span<const Piece> pieces, DataType dtype) {
    pieces_ = pieces;
    element_bytes_ = size_of(dtype);
    begins_.clear();
    elements_ = 0;
    prescaled_ = false;
    for (const Piece& piece : pieces) {
      begins_.push_back(elements_);
      elements_ += piece.count;
      prescaled_ = prescaled_ || piece.prescale != 1.0;
    }
  }
  std::uint64_t elements() const { return elements_; }
  // Whether some piece has a prescale other than 1.
  bool prescaled() const { return prescaled_; }

  // Calls visit(piece, input, output, at, count) for what of each piece lies within `range`:
  // `count` elements, of which the first has these addresses and is `at` elements after
  // range.begin.
  template <typename Visit>
  void for_each(Range range, Visit&& visit) const {
    if (range.begin >= range.end) return;
    const auto after = std::upper_bound(begins_.begin(), begins_.end(), range.begin);
    for (auto i = static_cast<std::size_t>(after - begins_.begin()) - 1;
         i < pieces_.size() && begins_[i] < range.end; ++i) {
      const Piece& piece = pieces_[i];
      const std::uint64_t begin = std::max(begins_[i], range.begin);
      const std::uint64_t end = std::min(begins_[i] + piece.count, range.end);
      if (begin >= end) continue;
      const std::uint64_t skipped = (begin - begins_[i]) * element_bytes_;
      visit(piece, static_cast<const std::byte*>(piece.input) + skipped,
            static_cast<std::byte*>(piece.output) + skipped, begin - range.begin, end - begin);
    }
  }

 private:
  std::span<const Piece> pieces_;
  std::vector<std::uint64_t> begins_;  // the place in the run of each piece's first element
  std::uint64_t elements_ = 0;
  std::size_t element_bytes_ = 1;
  bool prescaled_ = false;
};

}  // namespace hvdlite
