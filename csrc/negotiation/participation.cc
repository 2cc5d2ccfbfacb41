#include "negotiation/participation.h"

#include <algorithm>
#include <iterator>

namespace hvdlite {

bool Participation::is_new(const std::string& name) const {
  const auto found = names_.find(name);
  return found == names_.end() || !found->second.answered;
}

bool Participation::catch_up(const std::string& name, std::size_t member) {
  const auto found = names_.find(name);
  if (found == names_.end() || found->second.owed[member] == 0) return false;
  --found->second.owed[member];
  return true;
}

void Participation::arrive(const std::string& name, std::size_t member, const LateTerms& call,
                           bool cached) {
  const auto [found, is_new] = names_.try_emplace(name);
  Name& one = found->second;
  if (is_new) {
    one.step = call.step;
    one.owed.resize(active_.size());
  }
  const auto [at, opened] = steps_.try_emplace(one.step);
  Step& step = at->second;
  if (opened) {
    step.call = call;
    step.in.resize(active_.size());
    forget_old_steps();
  }
  step.unanswered += one.submitted ? 0 : 1;
  one.submitted = true;
  step.cached = step.cached && cached;
  if (!step.closed) step.in[member] = true;
}

// Steps follow each other, so all names of the step before the last two were answered; one that is
// not, because ranks submit names for steps as nobody should, stays until it is.
void Participation::forget_old_steps() {
  constexpr std::size_t kKept = 3;
  const auto first_kept =
      steps_.size() <= kKept
          ? steps_.begin()
          : std::next(steps_.begin(), std::ssize(steps_) - std::ptrdiff_t{kKept});
  for (auto at = steps_.begin(); at != first_kept;) {
    const bool done = at->second.closed && at->second.unanswered == 0;
    at = done ? steps_.erase(at) : std::next(at);
  }
}

std::uint32_t Participation::behind(std::size_t member) const {
  std::uint32_t steps = 0;
  for (const auto& [name, one] : names_) steps = std::max(steps, one.owed[member]);
  return steps;
}

Participation::Count Participation::count(const Step& step) const {
  Count count;
  for (std::size_t i = 0; i < active_.size(); ++i) {
    if (!active_[i]) continue;
    ++count.active;
    if (step.in[i]) ++count.in;
  }
  const std::size_t all = active_.size();
  count.quorum = (step.call.quorum * count.active + all - 1) / all;
  return count;
}

bool Participation::bounded(const Step& step) const {
  for (std::size_t i = 0; i < active_.size(); ++i) {
    if (active_[i] && !step.in[i] && behind(i) >= step.call.bound) return true;
  }
  return false;
}

bool Participation::can_close(Step& step, TimePoint now) const {
  const Count count = this->count(step);
  if (count.in == count.active) return true;
  if (count.in < count.quorum) {
    step.quorate.reset();  // a member that participated has joined
    return false;
  }
  if (!step.quorate) step.quorate = now;
  const bool waited = now >= *step.quorate + std::chrono::microseconds(step.call.grace_us);
  return step.cached && waited && !bounded(step);
}

bool Participation::close(TimePoint now) {
  bool some = false;
  for (auto& [number, step] : steps_) {
    if (step.closed || !can_close(step, now)) continue;
    step.closed = true;
    some = true;
  }
  return some;
}

std::optional<Participation::TimePoint> Participation::due() const {
  std::optional<TimePoint> first;
  for (const auto& [number, step] : steps_) {
    if (step.closed || !step.cached || !step.quorate || bounded(step)) continue;
    const TimePoint at = *step.quorate + std::chrono::microseconds(step.call.grace_us);
    if (!first || at < *first) first = at;
  }
  return first;
}

const Participation::Step* Participation::closed_step(const std::string& name) const {
  const auto found = names_.find(name);
  if (found == names_.end()) return nullptr;
  const auto step = steps_.find(found->second.step);
  return step != steps_.end() && step->second.closed ? &step->second : nullptr;
}

bool Participation::awaits(const std::string& name, std::size_t member) const {
  const Step* step = closed_step(name);
  return active_[member] && (step == nullptr || step->in[member]);
}

bool Participation::complete(const std::string& name, const Presence& submitted) const {
  if (closed_step(name) == nullptr) return false;
  for (std::size_t i = 0; i < submitted.size(); ++i) {
    if (!submitted[i] && awaits(name, i)) return false;
  }
  return true;
}

Presence Participation::answer(const std::string& name, const Presence& submitted) {
  Name& one = names_.at(name);
  Step& step = steps_.at(one.step);
  Presence late(active_.size());
  for (std::size_t i = 0; i < active_.size(); ++i) {
    late[i] = active_[i] && !step.in[i];
    if (late[i] && !submitted[i]) ++one.owed[i];
  }
  --step.unanswered;
  one.submitted = false;
  one.answered = true;
  ++one.step;
  return late;
}

void Participation::join(std::size_t member) {
  active_[member] = false;
  for (auto& [name, one] : names_) one.owed[member] = 0;
}

void Participation::return_all() {
  active_.assign(active_.size(), true);
  steps_.clear();
  std::uint64_t next = 0;
  for (const auto& [name, one] : names_) next = std::max(next, one.step);
  for (auto& [name, one] : names_) one.step = next;
}

}  // namespace hvdlite
