#include "transport/gradient_area.h"

#include "base/fd.h"

namespace hvdlite {

GradientArea::Part GradientArea::lend(std::size_t bytes) {
  const std::span<std::byte> area = segment_->gradients();
  if (bytes == 0 || bytes > area.size()) return nullptr;
  const std::uint64_t unit = bytes < kHugePage ? kPage : kHugePage;
  const std::uint64_t length = round_up(bytes, kPage);
  std::uint64_t begin = 0;
  {
    MutexLock lock(mutex_);
    for (const auto& [next, end] : lent_) {  // the first gap that is long enough
      if (begin + length <= next) break;
      begin = round_up(end, unit);
    }
    if (begin + length > area.size()) return nullptr;
    lent_[begin] = begin + length;
  }
  const std::span<std::byte> part = area.subspan(begin, bytes);
  prefer_huge_pages(part.data(), part.size());
  return {new std::span<std::byte>(part),
          [self = shared_from_this(), begin](const std::span<std::byte>* ended) {
            delete ended;
            self->take_back(begin);
          }};
}

void GradientArea::take_back(std::uint64_t begin) {
  MutexLock lock(mutex_);
  const auto part = lent_.find(begin);
  segment_->discard_gradients(begin, part->second - begin);
  lent_.erase(part);
}

}  // namespace hvdlite
