// Spans of memory that count as one run of bytes, from 0 on: the blocks of several tensors that
// travel together. A value; the memory is borrowed. Any thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/pieces.h"

namespace hvdlite {

// Copies bytes that need not move where they already lie.
inline void copy_bytes(std::span<const std::byte> from, std::byte* to) {
  if (!from.empty() && from.data() != to) std::memmove(to, from.data(), from.size());
}

template <typename Byte>
class SpanList {
 public:
  void add(std::span<Byte> span) {
    if (span.empty()) return;
    begins_.push_back(bytes_);
    spans_.push_back(span);
    bytes_ += span.size();
  }
  std::size_t bytes() const { return bytes_; }

  // Calls visit(span) for what lies within `range`, in order. The range may end behind the run.
  template <typename Visit>
  void for_each(Range range, Visit&& visit) const {
    if (range.begin >= std::min<std::uint64_t>(range.end, bytes_)) return;
    const auto after = std::upper_bound(begins_.begin(), begins_.end(), range.begin);
    for (auto i = static_cast<std::size_t>(after - begins_.begin()) - 1;
         i < spans_.size() && begins_[i] < range.end; ++i) {
      const std::size_t begin = std::max<std::size_t>(begins_[i], range.begin) - begins_[i];
      const std::size_t end = std::min<std::size_t>(begins_[i] + spans_[i].size(), range.end);
      visit(spans_[i].subspan(begin, end - begins_[i] - begin));
    }
  }
  // The part of the run that lies within `range`.
  SpanList part(Range range) const {
    SpanList result;
    for_each(range, [&](std::span<Byte> span) { result.add(span); });
    return result;
  }
  void add(const SpanList& other) {
    for (const std::span<Byte> span : other.spans_) add(span);
  }

 private:
  std::vector<std::span<Byte>> spans_;
  std::vector<std::size_t> begins_;
  std::size_t bytes_ = 0;
};

}  // namespace hvdlite
