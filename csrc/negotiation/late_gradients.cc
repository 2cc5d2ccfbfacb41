#include "negotiation/late_gradients.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "negotiation/coordinator.h"

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

bool LateGradients::take(PendingTable& table, std::size_t member, const Request& request,
                         TimePoint now) {
  ByKey& by_key = sets_[id_of(table)];
  const auto found = by_key.find(request.late->key);
  if (found == by_key.end() || !found->second.catch_up(request.name, member)) return false;
  close(table, found->second, found->first, now);
  return true;
}

void LateGradients::submitted(PendingTable& table, PendingTensor& pending, std::size_t member,
                              const Request& request, TimePoint now) {
  const std::vector<int>& ranks = table.group.ranks;
  const LateTerms& call = *pending.request.late;
  const auto [at, is_new] = sets_[id_of(table)].try_emplace(call.key, ranks.size());
  Participation& one = at->second;
  for (std::size_t i = 0; i < ranks.size() && is_new; ++i) {
    if (coordinator_.joined(ranks[i])) one.join(i);
  }
  if (pending.refusal.ok() && one.is_new(request.name) && request.late->step != call.step) {
    pending.refusal = Status(
        StatusCode::kMismatch,
        describe(request) + ": ranks disagree about the step of late gradients: rank " +
            std::to_string(pending.first_rank) + " has " + std::to_string(call.step) + ", rank " +
            std::to_string(ranks[member]) + " has " + std::to_string(request.late->step));
  }
  const std::string key = request.key();
  one.arrive(request.name, member, call, coordinator_.cache().find(key, request).has_value());
  close(table, one, at->first, now);
  answer_if_complete(table, key, now);
}

void LateGradients::answer_if_complete(PendingTable& table, const std::string& key, TimePoint now) {
  const auto found = table.tensors.find(key);
  if (found == table.tensors.end()) return;
  const PendingTensor& pending = found->second;
  const bool complete = of(table, pending).complete(pending.request.name, pending.submitted);
  if (complete) coordinator_.answer(table, key, now);
}

void LateGradients::close(PendingTable& table, Participation& one, const std::string& key,
                          TimePoint now) {
  if (!one.close(now)) return;
  std::vector<std::pair<std::uint64_t, std::string>> keys;  // in the order of first submission
  for (const auto& [tensor, pending] : table.tensors) {
    const bool concerned = pending.request.late && pending.request.late->key == key;
    if (concerned) keys.emplace_back(pending.number, tensor);
  }
  std::sort(keys.begin(), keys.end());
  for (const auto& [number, tensor] : keys) answer_if_complete(table, tensor, now);
}

bool LateGradients::awaits(const PendingTable& table, const PendingTensor& pending,
                           std::size_t member) const {
  const Participation& one = sets_.at(id_of(table)).at(pending.request.late->key);
  return one.awaits(pending.request.name, member);
}

void LateGradients::complete(const PendingTable& table, const PendingTensor& pending,
                             Response& response) {
  const Presence late = of(table, pending).answer(pending.request.name, pending.submitted);
  for (std::size_t i = 0; i < late.size(); ++i) {
    if (late[i]) response.left_out.push_back(table.group.ranks[i]);
  }
}

void LateGradients::joined(int rank, TimePoint now) {
  for (auto& [set, by_key] : sets_) {
    PendingTable& table = coordinator_.tables().at(set);
    const int index = table.group.index_of(rank);
    if (index < 0) continue;
    for (auto& [key, one] : by_key) {
      one.join(static_cast<std::size_t>(index));
      close(table, one, key, now);
    }
    std::vector<std::string> keys;  // Their closed steps are complete without this rank.
    for (const auto& [key, pending] : table.tensors) {
      if (pending.request.late) keys.push_back(key);
    }
    std::sort(keys.begin(), keys.end());
    for (const std::string& key : keys) answer_if_complete(table, key, now);
  }
}

void LateGradients::all_joined() {
  for (auto& [set, by_key] : sets_) {
    for (auto& [key, one] : by_key) one.return_all();
  }
}

std::optional<LateGradients::TimePoint> LateGradients::due() const {
  std::optional<TimePoint> first;
  for (const auto& [set, by_key] : sets_) {
    for (const auto& [key, one] : by_key) {
      const auto due = one.due();
      if (due && (!first || *due < *first)) first = due;
    }
  }
  return first;
}

void LateGradients::tick(TimePoint now) {
  for (auto& [set, by_key] : sets_) {
    PendingTable& table = coordinator_.tables().at(set);
    for (auto& [key, one] : by_key) close(table, one, key, now);
  }
}

}  // namespace hvdlite
