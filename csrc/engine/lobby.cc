#include "engine/lobby.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "engine/engine.h"
#include "entry/entry_check.h"
#include "execution/kept_inputs.h"

namespace hvdlite {
namespace {

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// Says why the entry cannot be redone; empty: it can.
std::string obstacle(const Entry& entry, const std::vector<GroupPtr>& sets,
                     const std::vector<int>& gone) {
  const Request& request = entry.request;
  const std::string text = describe(request) + " was in flight";
  if (request.kind == Kind::kAlltoall || request.kind == Kind::kReducescatter) {
    return text + ", whose parts depend on the ranks that are gone";
  }
  if (request.kind == Kind::kBroadcast && contains(gone, request.root)) {
    return text + ", and its root, rank " + std::to_string(request.root) + ", is gone";
  }
  for (const GroupPtr& set : sets) {
    if (static_cast<std::uint32_t>(set->id) != request.process_set) continue;
    for (const int rank : set->ranks) {
      if (contains(gone, rank)) {
        return text + ", and " + describe(*set) + " has lost rank " + std::to_string(rank);
      }
    }
  }
  return "";
}

// The ranks of the set in the next world; empty where one is gone.
std::vector<int> translated(const std::vector<int>& ranks, const std::vector<int>& rank_of) {
  std::vector<int> result;
  for (const int rank : ranks) {
    const bool known = rank < static_cast<int>(rank_of.size()) && rank_of[rank] >= 0;
    if (!known) return {};
    result.push_back(rank_of[rank]);
  }
  std::sort(result.begin(), result.end());
  return result;
}

// Makes an entry fit for the next engine. kRankFailed where it names a rank that is gone.
Status renew(Entry& entry, const std::vector<int>& rank_of) {
  entry.completion->clear_results();
  HVDLITE_RETURN_IF_ERROR(restore_inputs(entry));
  Request& request = entry.request;
  if (request.kind == Kind::kBroadcast) {
    const std::vector<int> root = translated({request.root}, rank_of);
    if (root.empty()) {
      return of_call(request, Status(StatusCode::kRankFailed,
                                     "its root, rank " + std::to_string(request.root) +
                                         " of the former world, is gone"));
    }
    request.root = root[0];
  }
  if (!request.changes_process_sets()) return Status();
  std::vector<int> ranks(request.ranks.begin(), request.ranks.end());
  ranks = translated(ranks, rank_of);
  if (ranks.empty()) {
    return of_call(request, Status(StatusCode::kRankFailed, "one of its ranks is gone"));
  }
  request.ranks.assign(ranks.begin(), ranks.end());
  return Status();
}

}  // namespace

Lobby::Lobby() : lost_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void Lobby::park(const Engine& engine, Parked parked) {
  MutexLock lock(mutex_);
  if (world_ == &engine) {
    parked_ = std::move(parked);
  } else {
    early_ = &engine;
    left_early_ = std::move(parked);
  }
  const std::uint64_t one = 1;
  (void)!::write(lost_.get(), &one, sizeof(one));
}

std::vector<const Entry*> Lobby::waiting() const {
  std::vector<const Entry*> waiting;
  if (parked_.commits != nullptr) waiting = parked_.commits->rest();
  for (const EntryPtr& entry : parked_.entries) waiting.push_back(entry.get());
  for (const EntryPtr& entry : late_) waiting.push_back(entry.get());
  return waiting;
}

Lobby::Report Lobby::report(const std::vector<int>& gone) const {
  MutexLock lock(mutex_);
  Report report;
  report.cause = parked_.cause;
  if (parked_.commits != nullptr) report.commits = parked_.commits->counts();
  for (const Entry* entry : waiting()) {
    report.stuck = obstacle(*entry, parked_.process_sets, gone);
    if (!report.stuck.empty()) break;
  }
  return report;
}

void Lobby::deliver(const CommitCounts& cut) {
  std::vector<EntryPtr> handed_out;
  {
    MutexLock lock(mutex_);
    if (parked_.commits == nullptr) return;
    handed_out = parked_.commits->complete_up_to(cut);
  }
  for (const EntryPtr& entry : handed_out) {
    entry->kept.clear();
    entry->completion->finish(Status());
  }
}

std::vector<std::pair<int, std::vector<int>>> Lobby::process_sets(
    const std::vector<int>& rank_of) const {
  MutexLock lock(mutex_);
  std::map<int, std::vector<int>> sets;
  for (const GroupPtr& set : parked_.process_sets) sets[set->id] = set->ranks;
  for (const Entry* entry : waiting()) {  // what it changed is not committed: it did not happen
    const Request& request = entry->request;
    if (request.kind == Kind::kAddProcessSet) sets.erase(entry->completion->set_id);
    if (request.kind == Kind::kRemoveProcessSet) {
      sets[static_cast<int>(entry->removes)] = {request.ranks.begin(), request.ranks.end()};
    }
  }
  std::vector<std::pair<int, std::vector<int>>> alive;
  for (const auto& [id, ranks] : sets) {
    std::vector<int> own = translated(ranks, rank_of);
    if (!own.empty()) alive.emplace_back(id, std::move(own));
  }
  return alive;
}

std::vector<EntryPtr> Lobby::take_all() {
  std::vector<EntryPtr> all = std::exchange(parked_.entries, {});
  if (parked_.commits != nullptr) {
    for (EntryPtr& entry : parked_.commits->take_rest()) all.push_back(std::move(entry));
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const EntryPtr& a, const EntryPtr& b) { return a->order < b->order; });
  for (EntryPtr& entry : std::exchange(late_, {})) all.push_back(std::move(entry));
  return all;
}

Status Lobby::give(const EntryPtr& entry) {
  const Status status = world_->take(entry, /*blocking=*/false);
  if (!status.sticky()) return status;
  late_.push_back(entry);
  return Status();
}

void Lobby::resume(Engine& next, const std::vector<int>& rank_of) {
  std::vector<std::pair<EntryPtr, Status>> failed;
  {
    MutexLock lock(mutex_);
    const std::vector<EntryPtr> entries = take_all();
    world_ = &next;
    rank_of_ = rank_of;
    parked_ = early_ == &next ? std::exchange(left_early_, {}) : Parked();
    for (const EntryPtr& entry : entries) {
      Status status = renew(*entry, rank_of);
      if (status.ok()) status = give(entry);
      if (!status.ok()) failed.emplace_back(entry, std::move(status));
    }
  }
  for (auto& [entry, status] : failed) entry->completion->finish(std::move(status));
}

void Lobby::fail(const Status& why) {
  std::vector<EntryPtr> all;
  {
    MutexLock lock(mutex_);
    all = take_all();
  }
  for (const EntryPtr& entry : all) {
    entry->kept.clear();
    entry->completion->finish(of_call(entry->request, why));
  }
}

Status Lobby::admit(const Engine& ended, const EntryPtr& entry) {
  MutexLock lock(mutex_);
  if (world_ == nullptr) return Status(StatusCode::kShutdown, "hvdlite was shut down");
  if (world_ != &ended) {
    HVDLITE_RETURN_IF_ERROR(renew(*entry, rank_of_));
    return give(entry);
  }
  for (const Entry* other : waiting()) {
    if (other->key == entry->key) return duplicate_name(entry->request);
  }
  late_.push_back(entry);
  return Status();
}

void Lobby::forget(const Engine& engine) {
  MutexLock lock(mutex_);
  if (world_ == &engine) world_ = nullptr;
}

}  // namespace hvdlite
