#include "negotiation/cycle_watch.h"

#include <algorithm>
#include <utility>

namespace hvdlite {
namespace {

constexpr std::int64_t kMostNeeded = 1 << 20;

}  // namespace

void CycleWatch::note(std::uint32_t id) {
  if (under_way(id)) {
    std::vector<std::uint32_t> sorted = ids_;
    std::sort(sorted.begin(), sorted.end());
    alike_ = sorted == before_sorted_ ? alike_ + 1 : 1;
    for (const std::uint32_t one : ids_) seen_[one] = false;
    before_ = std::exchange(ids_, {});
    before_sorted_ = std::move(sorted);
  }
  if (id >= seen_.size()) seen_.resize(id + std::size_t{1});
  seen_[id] = true;
  ids_.push_back(id);
}

void CycleWatch::reset() {
  for (const std::uint32_t one : ids_) seen_[one] = false;
  ids_.clear();
  before_.clear();
  before_sorted_.clear();
  alike_ = 0;
}

bool CycleWatch::ready() const {
  if (!on() || alike_ < needed_) return false;
  return std::all_of(ids_.begin(), ids_.end(), [&](std::uint32_t id) {
    return std::binary_search(before_sorted_.begin(), before_sorted_.end(), id);
  });
}

std::vector<std::uint32_t> CycleWatch::schedule() const {
  std::vector<std::uint32_t> ids;
  std::copy_if(before_.begin(), before_.end(), std::back_inserter(ids),
               [&](std::uint32_t id) { return !under_way(id); });
  ids.insert(ids.end(), ids_.begin(), ids_.end());
  return ids;
}

void CycleWatch::thawed(std::uint64_t cycles) {
  const bool paid = cycles >= static_cast<std::uint64_t>(needed_);
  needed_ = paid ? cycles_ : std::min(2 * needed_, std::max(kMostNeeded, cycles_));
  reset();
}

}  // namespace hvdlite
