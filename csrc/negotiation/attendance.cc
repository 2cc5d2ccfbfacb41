#include "negotiation/attendance.h"

#include <algorithm>

namespace hvdlite {

Attendance::Key& Attendance::open(const std::string& key) {
  const auto [at, is_new] = keys_.try_emplace(key);
  if (is_new) at->second.rows.resize(static_cast<std::size_t>(size_));
  return at->second;
}

std::uint64_t Attendance::answered(const std::string& key, const std::string& name,
                                   const std::vector<int>& late) {
  MutexLock lock(mutex_);
  Key& one = open(key);
  if (one.names.contains(name)) {
    one.names_before = one.names.size();
    one.names.clear();
    ++one.step;
  }
  if (one.names.empty()) {
    for (const int rank : late) {
      const bool exists = rank >= 0 && rank < size_;  // the list has come from a peer
      if (exists) ++one.rows[static_cast<std::size_t>(rank)].late;
    }
  }
  one.names.insert(name);
  if (std::binary_search(late.begin(), late.end(), rank_)) ++one.waits[one.step].results;
  return one.step;
}

void Attendance::taken(const std::string& key, const std::string& name, std::uint64_t step,
                       bool skips, bool folds) {
  MutexLock lock(mutex_);
  Key& one = open(key);
  if (one.own.contains(name)) one.own.clear();
  if (one.own.empty()) {
    Row& row = one.rows[static_cast<std::size_t>(rank_)];
    row.skipped += skips ? 1 : 0;
    row.folded += folds ? 1 : 0;
  }
  one.own.insert(name);
  const auto at = one.waits.find(step);
  if (at == one.waits.end()) return;
  ++at->second.taken;
  // The step of the last answer may still get more results.
  one.waits.erase(one.waits.begin(), one.waits.lower_bound(std::min(step, one.step)));
}

void Attendance::folded(const std::string& key, std::uint64_t age) {
  MutexLock lock(mutex_);
  Row& row = open(key).rows[static_cast<std::size_t>(rank_)];
  row.oldest = std::max(row.oldest, age);
}

void Attendance::clear() {
  MutexLock lock(mutex_);
  for (auto& [name, key] : keys_) key.waits.clear();
}

int Attendance::waiting(const std::string& key) const {
  MutexLock lock(mutex_);
  const auto found = keys_.find(key);
  if (found == keys_.end()) return 0;
  const Key& one = found->second;
  int whole = 0;
  for (const auto& [step, waiting] : one.waits) {
    const bool complete = step < one.step || one.names.size() >= one.names_before;
    if (complete && waiting.taken == 0) ++whole;
  }
  return whole;
}

std::vector<Attendance::Row> Attendance::rows(const std::string& key) const {
  MutexLock lock(mutex_);
  const auto found = keys_.find(key);
  return found == keys_.end() ? std::vector<Row>(static_cast<std::size_t>(size_))
                              : found->second.rows;
}

}  // namespace hvdlite
