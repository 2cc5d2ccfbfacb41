#include "negotiation/late_gradients.h"

#include <algorithm>
#include <utility>

namespace hvdlite {

bool LateGradients::take(PendingTable& table, std::size_t member, const Request& request,
                         TimePoint now) {
  ByKey& by_key = sets_[id_of(table)];
  const auto found = by_key.find(LateTerms::of(request.terms).key);
  if (found == by_key.end() || !found->second.catch_up(request.name, member)) return false;
  close(table, found->second, found->first, now);
  return true;
}

void LateGradients::submitted(PendingTable& table, PendingTensor& pending, std::size_t member,
                              const Request& request, TimePoint now) {
  const std::vector<int>& ranks = table.group.ranks;
  const LateTerms& call = LateTerms::of(pending.request.terms);
  const auto [at, is_new] = sets_[id_of(table)].try_emplace(call.key, ranks.size());
  Participation& one = at->second;
  for (std::size_t i = 0; i < ranks.size() && is_new; ++i) {
    if (coordinator_.joined(ranks[i])) one.join(i);
  }
  if (pending.refusal.ok() && one.is_new(request.name) &&
      LateTerms::of(request.terms).step != call.step) {
    pending.refusal =
        Status(StatusCode::kMismatch,
               describe(request) + ": ranks disagree about the step of late gradients: rank " +
                   std::to_string(pending.first_rank) + " has " + std::to_string(call.step) +
                   ", rank " + std::to_string(ranks[member]) + " has " +
                   std::to_string(LateTerms::of(request.terms).step));
  }
  const std::string key = request.key();
  one.arrive(request.name, member, call, coordinator_.has_cached(key, request));
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
    const bool concerned = pending.request.terms && LateTerms::of(pending.request.terms).key == key;
    if (concerned) keys.emplace_back(pending.number, tensor);
  }
  std::sort(keys.begin(), keys.end());
  for (const auto& [number, tensor] : keys) answer_if_complete(table, tensor, now);
}

bool LateGradients::awaits(const PendingTable& table, const PendingTensor& pending,
                           std::size_t member) const {
  const Participation& one = sets_.at(id_of(table)).at(LateTerms::of(pending.request.terms).key);
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
      if (pending.request.terms) keys.push_back(key);
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

void LateGradients::tick(TimePoint now, std::vector<Notice>& /*notices*/) {
  for (auto& [set, by_key] : sets_) {
    PendingTable& table = coordinator_.tables().at(set);
    for (auto& [key, one] : by_key) close(table, one, key, now);
  }
}

}  // namespace hvdlite
