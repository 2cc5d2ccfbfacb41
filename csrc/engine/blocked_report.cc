#include "engine/blocked_report.h"

namespace hvdlite {

void BlockedReport::note(std::vector<EntryPtr> waits, std::vector<std::string> places) {
  places.resize(waits.size());
  Noted noted{std::move(waits), std::move(places), queue_.pushed()};
  std::optional<Noted> dropped;  // once the lock is released
  {
    MutexLock lock(mutex_);
    if (ended_) return;
    dropped = std::exchange(noted_, std::move(noted));
  }
  asked_.store(true, std::memory_order_seq_cst);
  if (wake_runner_) wake_runner_();
}

std::optional<Bytes> BlockedReport::report(const Submissions& own) {
  std::optional<Noted> noted;
  {
    MutexLock lock(mutex_);
    noted = std::exchange(noted_, std::nullopt);
  }
  if (!noted) return std::nullopt;
  Blocked blocked = describe(*noted, own);
  const bool same = blocked == reported_ || (blocked.keys.empty() && reported_.keys.empty());
  if (same) return std::nullopt;
  reported_ = std::move(blocked);
  return encode(reported_);
}

void BlockedReport::world_ended() {
  std::optional<Noted> dropped;  // once the lock is released
  MutexLock lock(mutex_);
  ended_ = true;
  dropped = std::exchange(noted_, std::nullopt);
}

Blocked BlockedReport::describe(const Noted& noted, const Submissions& own) {
  // What was agreed while this rank was in a collective is still to run.
  if (!own.quiet || own.count != noted.submitted) return {};
  Blocked blocked{own.count, static_cast<std::uint32_t>(own.pending.size()), {}, noted.places};
  for (const EntryPtr& entry : noted.waits) {
    const auto found = own.pending.find(entry->key);
    if (found == own.pending.end() || found->second != entry) return {};
    blocked.keys.push_back(entry->key);
  }
  if (blocked.keys.empty()) return {};
  // A continuation may submit.
  for (const auto& [key, entry] : own.pending) {
    if (entry->completion->has_continuation()) blocked.keys.push_back(key);
  }
  blocked.places.resize(blocked.keys.size());
  return blocked;
}

}  // namespace hvdlite
