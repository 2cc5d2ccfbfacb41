#include "engine/commit_book.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace hvdlite {
namespace {

// The high half of a count is the number of joins: a member that had joined missed the commits of
// the others, and all continue from the same number.
constexpr int kJoinShift = 32;

void append(std::vector<EntryPtr>& to, std::vector<EntryPtr> more) {
  to.insert(to.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

}  // namespace

void CommitBook::hold(EntryPtr entry, const Group& group) {
  const Request& request = entry->request;
  Set& set = sets_[request.process_set];
  set.group = group;
  if (request.kind == Kind::kCommit) {
    set.ending.push_back(std::move(entry));
  } else if (request.transaction.empty()) {
    set.due.push_back(std::move(entry));
  } else {
    set.held[request.transaction].push_back(std::move(entry));
  }
}

void CommitBook::end_round() {
  for (auto& [id, set] : sets_) {
    for (EntryPtr& commit : std::exchange(set.ending, {})) {
      if (auto ended = set.held.extract(commit->request.transaction)) {
        append(set.due, std::move(ended.mapped()));
      }
      set.due.push_back(std::move(commit));
    }
  }
}

std::vector<std::uint32_t> CommitBook::due_sets() const {
  std::vector<std::uint32_t> ids;
  for (const auto& [id, set] : sets_) {
    if (!set.due.empty()) ids.push_back(id);
  }
  return ids;
}

bool CommitBook::joins(const Set& set) {
  return std::any_of(set.due.begin(), set.due.end(),
                     [](const EntryPtr& entry) { return entry->request.kind == Kind::kJoin; });
}

std::uint64_t CommitBook::next_count(std::uint32_t id) const {
  MutexLock lock(mutex_);
  if (joins(sets_.at(id))) return (joins_ + 1) << kJoinShift;
  const auto found = counts_.find(id);
  return (found == counts_.end() ? joins_ << kJoinShift : found->second) + 1;
}

std::vector<EntryPtr> CommitBook::complete(std::uint32_t id) {
  const std::uint64_t count = next_count(id);
  std::vector<EntryPtr> handed_out = std::exchange(sets_.at(id).due, {});
  MutexLock lock(mutex_);
  counts_[id] = count;
  if (count >> kJoinShift != joins_) {
    joins_ = count >> kJoinShift;
    for (auto& [other, of_other] : counts_) of_other = count;
  }
  return handed_out;
}

std::vector<EntryPtr> CommitBook::drop(std::uint32_t id) {
  std::vector<EntryPtr> dropped;
  const auto set = sets_.extract(id);
  if (set.empty()) return dropped;
  for (auto& [transaction, held] : set.mapped().held) append(dropped, std::move(held));
  return dropped;
}

CommitCounts CommitBook::counts() const {
  MutexLock lock(mutex_);
  return counts_;
}

std::vector<EntryPtr> CommitBook::complete_up_to(const CommitCounts& commit_point) {
  std::vector<EntryPtr> handed_out;
  for (const std::uint32_t id : due_sets()) {
    const auto reached = commit_point.find(id);
    if (reached == commit_point.end() || reached->second < next_count(id)) continue;
    append(handed_out, complete(id));
  }
  return handed_out;
}

std::vector<EntryPtr> CommitBook::take_rest() {
  std::vector<EntryPtr> rest;
  for (auto& [id, set] : std::exchange(sets_, {})) {
    append(rest, std::move(set.due));
    append(rest, std::move(set.ending));
    for (auto& [transaction, held] : set.held) append(rest, std::move(held));
  }
  return rest;
}

std::vector<const Entry*> CommitBook::rest() const {
  std::vector<const Entry*> rest;
  for (const auto& [id, set] : sets_) {
    for (const EntryPtr& entry : set.due) rest.push_back(entry.get());
    for (const EntryPtr& entry : set.ending) rest.push_back(entry.get());
    for (const auto& [transaction, held] : set.held) {
      for (const EntryPtr& entry : held) rest.push_back(entry.get());
    }
  }
  return rest;
}

}  // namespace hvdlite
