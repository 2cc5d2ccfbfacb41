// The tensors of a batch as one run of elements, numbered from 0 across tensors. The list borrows
// the pieces, and they their memory, until the next assign(); it keeps its capacity between
// batches. Thread: the engine's runner.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "kernels/chunks.h"

namespace hvdlite {

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
