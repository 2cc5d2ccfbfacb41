// The coordinator's part in rolls (roll.h): requests that do not wait for all members.
#include <algorithm>
#include <utility>

#include "negotiation/coordinator.h"

namespace hvdlite {

bool Coordinator::catch_up(PendingTable& table, std::size_t index, const Request& request,
                           TimePoint now) {
  const auto found = table.rolls.find(request.roll->key);
  if (found == table.rolls.end() || !found->second.catch_up(request.name, index)) return false;
  close_roll(table, found->second, found->first, now);
  return true;
}

void Coordinator::arrive(PendingTable& table, const std::string& key, std::size_t index,
                         const Request& request, TimePoint now) {
  rolls_ = true;
  PendingTensor& pending = table.tensors.at(key);
  const RollCall& call = *pending.request.roll;
  const auto [at, is_new] = table.rolls.try_emplace(call.key, table.group.ranks.size());
  Roll& roll = at->second;
  const int rank = table.group.ranks[index];
  if (is_new) {
    for (std::size_t i = 0; i < table.group.ranks.size(); ++i) {
      if (joined_[table.group.ranks[i]]) roll.join(i);
    }
  }
  if (pending.refusal.ok() && roll.is_new(request.name) && request.roll->step != call.step) {
    pending.refusal =
        Status(StatusCode::kMismatch,
               describe(request) + ": ranks disagree about the step of the roll call: rank " +
                   std::to_string(pending.first_rank) + " has " + std::to_string(call.step) +
                   ", rank " + std::to_string(rank) + " has " + std::to_string(request.roll->step));
  }
  const bool cached = cache_.find(key, request).has_value();
  roll.arrive(request.name, index, call, cached);
  if (fail_if_left(table, pending)) {
    table.tensors.erase(key);
    --waiting_;
    return;
  }
  close_roll(table, roll, at->first, now);
  respond_if_complete(table, key, now);
}

void Coordinator::respond_if_complete(PendingTable& table, const std::string& key, TimePoint now) {
  const auto found = table.tensors.find(key);
  if (found == table.tensors.end()) return;
  const PendingTensor& pending = found->second;
  const Roll& roll = table.rolls.at(pending.request.roll->key);
  if (!roll.complete(pending.request.name, pending.submitted)) return;
  auto node = table.tensors.extract(found);
  --waiting_;
  respond(table, std::move(node.mapped()), now);
}

void Coordinator::close_roll(PendingTable& table, Roll& roll, const std::string& roll_key,
                             TimePoint now) {
  if (!roll.close(now)) return;
  std::vector<std::pair<std::uint64_t, std::string>> keys;  // in the order of the tensors
  for (const auto& [key, pending] : table.tensors) {
    const bool concerned = pending.request.roll && pending.request.roll->key == roll_key;
    if (concerned) keys.emplace_back(pending.number, key);
  }
  std::sort(keys.begin(), keys.end());
  for (const auto& [number, key] : keys) respond_if_complete(table, key, now);
}

bool Coordinator::is_late(const PendingTable& table, const PendingTensor& pending,
                          std::size_t index) {
  if (!pending.request.roll) return false;
  const auto roll = table.rolls.find(pending.request.roll->key);
  return roll != table.rolls.end() && !roll->second.awaits(pending.request.name, index);
}

std::vector<int> Coordinator::note_late(PendingTable& table, const PendingTensor& pending) {
  Roll& roll = table.rolls.at(pending.request.roll->key);
  const Presence late = roll.answer(pending.request.name, pending.submitted);
  std::vector<int> ranks;
  for (std::size_t i = 0; i < late.size(); ++i) {
    if (late[i]) ranks.push_back(table.group.ranks[i]);
  }
  return ranks;
}

void Coordinator::close_rolls(TimePoint now) {
  for (auto& [id, table] : tables_) {
    for (auto& [key, roll] : table.rolls) close_roll(table, roll, key, now);
  }
}

std::optional<Coordinator::TimePoint> Coordinator::rolls_due() const {
  std::optional<TimePoint> first;
  if (!rolls_) return first;
  for (const auto& [id, table] : tables_) {
    for (const auto& [key, roll] : table.rolls) {
      const auto due = roll.due();
      if (due && (!first || *due < *first)) first = due;
    }
  }
  return first;
}

void Coordinator::join_rolls(int rank, TimePoint now) {
  for (auto& [id, table] : tables_) {
    const int index = table.group.index_of(rank);
    if (index < 0) continue;
    for (auto& [key, roll] : table.rolls) {
      roll.join(static_cast<std::size_t>(index));
      close_roll(table, roll, key, now);
    }
    std::vector<std::string> keys;  // closed before, and complete without this rank
    for (const auto& [key, pending] : table.tensors) {
      if (pending.request.roll) keys.push_back(key);
    }
    std::sort(keys.begin(), keys.end());
    for (const std::string& key : keys) respond_if_complete(table, key, now);
  }
}

void Coordinator::return_to_rolls() {
  for (auto& [id, table] : tables_) {
    for (auto& [key, roll] : table.rolls) roll.return_all();
  }
}

}  // namespace hvdlite
