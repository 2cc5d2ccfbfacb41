#include "negotiation/frozen_schedule.h"

#include <algorithm>
#include <utility>

namespace hvdlite {

void FrozenSchedule::begin(std::vector<std::uint32_t> ids) {
  ids_ = std::move(ids);
  slots_.assign(*std::max_element(ids_.begin(), ids_.end()) + std::size_t{1}, 0);
  for (std::size_t slot = 0; slot < ids_.size(); ++slot) {
    slots_[ids_[slot]] = static_cast<std::uint32_t>(slot) + 1;
  }
  submitted_.assign(ids_.size(), false);
  position_ = ready_ = 0;
  voted_ = thaws_ = false;
}

std::optional<std::uint32_t> FrozenSchedule::slot_of(std::uint32_t id) const {
  if (id >= slots_.size() || slots_[id] == 0) return std::nullopt;
  return slots_[id] - 1;
}

bool FrozenSchedule::admit(std::uint32_t id) {
  const auto slot = slot_of(id);
  if (!slot) return false;
  submitted_[*slot] = true;
  while (ready_ < position_ + ids_.size() && submitted_[slot_at(ready_)]) ++ready_;
  return true;
}

std::uint64_t FrozenSchedule::vote() {
  voted_ = true;
  return thaws_ ? position_ : ready_;
}

std::vector<std::uint32_t> FrozenSchedule::decide(std::uint64_t lowest) {
  std::vector<std::uint32_t> slots;
  for (; position_ < lowest; ++position_) {
    slots.push_back(slot_at(position_));
    submitted_[slots.back()] = false;
  }
  ++round_;
  voted_ = false;
  if (slots.empty()) ids_.clear();
  return slots;
}

}  // namespace hvdlite
