// The coordinator's part in rolls (roll.h): requests that do not wait for all members.
#include <algorithm>
#include <utility>

#include "negotiation/coordinator.h"

namespace hvdlite {

bool Coordinator::catch_up(Book& book, std::size_t index, const Request& request, TimePoint now) {
  const auto found = book.rolls.find(request.roll->key);
  if (found == book.rolls.end() || !found->second.catch_up(request.name, index)) return false;
  close_roll(book, found->second, found->first, now);
  return true;
}

void Coordinator::arrive(Book& book, const std::string& key, std::size_t index,
                         const Request& request, TimePoint now) {
  rolls_ = true;
  Tally& tally = book.tallies.at(key);
  const RollCall& call = *tally.request.roll;
  const auto [at, is_new] = book.rolls.try_emplace(call.key, book.group.ranks.size());
  Roll& roll = at->second;
  const int rank = book.group.ranks[index];
  if (is_new) {
    for (std::size_t i = 0; i < book.group.ranks.size(); ++i) {
      if (joined_[book.group.ranks[i]]) roll.join(i);
    }
  }
  if (tally.refusal.ok() && roll.is_new(request.name) && request.roll->step != call.step) {
    tally.refusal =
        Status(StatusCode::kMismatch,
               describe(request) + ": ranks disagree about the step of the roll call: rank " +
                   std::to_string(tally.first_rank) + " has " + std::to_string(call.step) +
                   ", rank " + std::to_string(rank) + " has " + std::to_string(request.roll->step));
  }
  const bool cached = cache_.find(key, request).has_value();
  roll.arrive(request.name, index, call, cached);
  if (fail_if_left(book, tally)) {
    book.tallies.erase(key);
    --waiting_;
    return;
  }
  close_roll(book, roll, at->first, now);
  respond_if_complete(book, key, now);
}

void Coordinator::respond_if_complete(Book& book, const std::string& key, TimePoint now) {
  const auto found = book.tallies.find(key);
  if (found == book.tallies.end()) return;
  const Tally& tally = found->second;
  const Roll& roll = book.rolls.at(tally.request.roll->key);
  if (!roll.complete(tally.request.name, tally.submitted)) return;
  auto node = book.tallies.extract(found);
  --waiting_;
  respond(book, std::move(node.mapped()), now);
}

void Coordinator::close_roll(Book& book, Roll& roll, const std::string& roll_key, TimePoint now) {
  if (!roll.close(now)) return;
  std::vector<std::pair<std::uint64_t, std::string>> keys;  // in the order of the tallies
  for (const auto& [key, tally] : book.tallies) {
    const bool concerned = tally.request.roll && tally.request.roll->key == roll_key;
    if (concerned) keys.emplace_back(tally.number, key);
  }
  std::sort(keys.begin(), keys.end());
  for (const auto& [number, key] : keys) respond_if_complete(book, key, now);
}

bool Coordinator::is_late(const Book& book, const Tally& tally, std::size_t index) {
  if (!tally.request.roll) return false;
  const auto roll = book.rolls.find(tally.request.roll->key);
  return roll != book.rolls.end() && !roll->second.awaits(tally.request.name, index);
}

std::vector<int> Coordinator::note_late(Book& book, const Tally& tally) {
  Roll& roll = book.rolls.at(tally.request.roll->key);
  const Presence late = roll.answer(tally.request.name, tally.submitted);
  std::vector<int> ranks;
  for (std::size_t i = 0; i < late.size(); ++i) {
    if (late[i]) ranks.push_back(book.group.ranks[i]);
  }
  return ranks;
}

void Coordinator::close_rolls(TimePoint now) {
  for (auto& [id, book] : books_) {
    for (auto& [key, roll] : book.rolls) close_roll(book, roll, key, now);
  }
}

std::optional<Coordinator::TimePoint> Coordinator::rolls_due() const {
  std::optional<TimePoint> first;
  if (!rolls_) return first;
  for (const auto& [id, book] : books_) {
    for (const auto& [key, roll] : book.rolls) {
      const auto due = roll.due();
      if (due && (!first || *due < *first)) first = due;
    }
  }
  return first;
}

void Coordinator::join_rolls(int rank, TimePoint now) {
  for (auto& [id, book] : books_) {
    const int index = book.group.index_of(rank);
    if (index < 0) continue;
    for (auto& [key, roll] : book.rolls) {
      roll.join(static_cast<std::size_t>(index));
      close_roll(book, roll, key, now);
    }
    std::vector<std::string> keys;  // closed before, and complete without this rank
    for (const auto& [key, tally] : book.tallies) {
      if (tally.request.roll) keys.push_back(key);
    }
    std::sort(keys.begin(), keys.end());
    for (const std::string& key : keys) respond_if_complete(book, key, now);
  }
}

void Coordinator::return_to_rolls() {
  for (auto& [id, book] : books_) {
    for (auto& [key, roll] : book.rolls) roll.return_all();
  }
}

}  // namespace hvdlite
