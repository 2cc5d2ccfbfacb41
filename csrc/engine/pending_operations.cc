#include "engine/pending_operations.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "engine/commit_book.h"
#include "engine/engine.h"
#include "engine/entry.h"

namespace hvdlite {
namespace {

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// The first of the ranks that the entry names and that are gone, or -1.
int named_gone(const Request& request, const std::vector<int>& gone) {
  for (const std::int64_t rank : request.ranks) {
    if (std::find(gone.begin(), gone.end(), rank) != gone.end()) return static_cast<int>(rank);
  }
  return -1;
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
  if (const int rank = named_gone(request, gone); rank >= 0) {
    return text + ", and rank " + std::to_string(rank) + " of its process set is gone";
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

constexpr std::int64_t kGone = -1;

// The rank's number in the next world, or kGone. A number that no rank had stays as it is: the next
// engine refuses it as any engine does.
std::int64_t translated(std::int64_t rank, const std::vector<int>& rank_of) {
  if (rank < 0 || rank >= static_cast<std::int64_t>(rank_of.size())) return rank;
  return rank_of[static_cast<std::size_t>(rank)];
}

// Says in the entry by which numbers the next world knows its ranks. kRankFailed where it names one
// that is gone.
Status renumbered(Request& request, const std::vector<int>& rank_of) {
  if (request.kind == Kind::kBroadcast) {
    const std::int64_t root = translated(request.root, rank_of);
    if (root == kGone) {
      return of_call(request, Status(StatusCode::kRankFailed, "its root, rank " +
                                                                  std::to_string(request.root) +
                                                                  " of a former world, is gone"));
    }
    request.root = static_cast<std::int32_t>(root);
  }
  for (std::int64_t& rank : request.ranks) {
    const std::int64_t next = translated(rank, rank_of);
    if (next == kGone && rank != kGone) {
      return of_call(request, Status(StatusCode::kRankFailed, "rank " + std::to_string(rank) +
                                                                  " of a former world is gone"));
    }
    rank = next;
  }
  return Status();
}

// Makes an entry fit for the next engine.
Status renew(Entry& entry, const std::vector<int>& rank_of) {
  entry.completion->clear_results();
  HVDLITE_RETURN_IF_ERROR(restore_inputs(entry));
  return renumbered(entry.request, rank_of);
}

void finish_all(const std::vector<EntryPtr>& entries, const Status& why) {
  for (const EntryPtr& entry : entries) {
    entry->kept.clear();
    entry->completion->finish(of_call(entry->request, why));
  }
}

}  // namespace

PendingOperations::PendingOperations() : lost_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void PendingOperations::suspend(const Engine& engine, Suspended suspended) {
  MutexLock lock(mutex_);
  note_sets(engine);
  const bool by_itself = suspended.by_itself;
  if (suspended.settled) settled_ = suspended.settled;
  if (world_ == &engine) {
    suspended_ = std::move(suspended);
  } else {
    early_ = &engine;
    left_early_ = std::move(suspended);
  }
  if (!by_itself) return;
  const std::uint64_t one = 1;
  (void)!::write(lost_.get(), &one, sizeof(one));
}

std::vector<const Entry*> PendingOperations::waiting() const {
  std::vector<const Entry*> waiting;
  if (suspended_.commits != nullptr) waiting = suspended_.commits->rest();
  for (const EntryPtr& entry : suspended_.entries) waiting.push_back(entry.get());
  for (const EntryPtr& entry : late_) waiting.push_back(entry.get());
  return waiting;
}

PendingOperations::Report PendingOperations::report(const std::vector<int>& gone) const {
  MutexLock lock(mutex_);
  Report report;
  report.cause = suspended_.cause;
  if (suspended_.commits != nullptr) report.commits = suspended_.commits->counts();
  for (const Entry* entry : waiting()) {
    report.stuck = obstacle(*entry, suspended_.process_sets, gone);
    if (!report.stuck.empty()) break;
  }
  return report;
}

void PendingOperations::deliver(const CommitCounts& commit_point) {
  std::vector<EntryPtr> handed_out;
  {
    MutexLock lock(mutex_);
    if (suspended_.commits == nullptr) return;
    handed_out = suspended_.commits->complete_up_to(commit_point);
  }
  for (const EntryPtr& entry : handed_out) {
    entry->kept.clear();
    entry->completion->finish(Status());
  }
}

std::vector<std::pair<int, std::vector<int>>> PendingOperations::process_sets(
    const std::vector<int>& rank_of) const {
  MutexLock lock(mutex_);
  std::map<int, std::vector<std::int64_t>> sets;
  for (const GroupPtr& set : suspended_.process_sets) {
    sets[set->id] = {set->ranks.begin(), set->ranks.end()};
  }
  for (const Entry* entry : waiting()) {  // what it changed is not committed: it did not happen
    const Request& request = entry->request;
    if (request.kind == Kind::kAddProcessSet) sets.erase(entry->completion->set_id);
    if (request.kind == Kind::kRemoveProcessSet) {
      sets[static_cast<int>(entry->removes)] = request.ranks;
    }
  }
  std::vector<std::pair<int, std::vector<int>>> alive;
  for (const auto& [id, ranks] : sets) {
    std::vector<int> own;
    for (const std::int64_t rank : ranks) {
      own.push_back(static_cast<int>(translated(rank, rank_of)));
    }
    std::sort(own.begin(), own.end());
    if (!own.empty() && own[0] != kGone) alive.emplace_back(id, std::move(own));
  }
  return alive;
}

int PendingOperations::highest_set() const {
  MutexLock lock(mutex_);
  return highest_set_;
}

std::optional<Tunables> PendingOperations::settled() const {
  MutexLock lock(mutex_);
  return settled_;
}

void PendingOperations::note_sets(const Engine& engine) {
  highest_set_ = std::max(highest_set_, engine.highest_set());
}

void PendingOperations::note(const Engine& engine) {
  note_sets(engine);
  if (const auto settled = engine.settled()) settled_ = settled;
}

std::vector<EntryPtr> PendingOperations::take_all() {
  std::vector<EntryPtr> all = std::exchange(suspended_.entries, {});
  if (suspended_.commits != nullptr) {
    for (EntryPtr& entry : suspended_.commits->take_rest()) all.push_back(std::move(entry));
  }
  std::sort(all.begin(), all.end(),
            [](const EntryPtr& a, const EntryPtr& b) { return a->order < b->order; });
  for (EntryPtr& entry : std::exchange(late_, {})) all.push_back(std::move(entry));
  return all;
}

Status PendingOperations::give(const EntryPtr& entry, Continuations& then) {
  HVDLITE_RETURN_IF_ERROR(world_->check(*entry));
  std::function<void()> continuation;
  if (world_->size() == 1) continuation = entry->completion->take_continuation();
  Status status = world_->submit(entry, /*blocking=*/false);
  if (continuation) {
    if (status.ok()) {
      then.push_back(std::move(continuation));
    } else {
      (void)entry->completion->then_unless_done(std::move(continuation));
    }
  }
  if (!status.sticky() || status.code() == StatusCode::kShutdown) return status;
  late_.push_back(entry);
  return Status();
}

void PendingOperations::renumber(const std::vector<int>& rank_of) {
  for (auto& [engine, numbers] : earlier_) {
    for (int& rank : numbers) rank = static_cast<int>(translated(rank, rank_of));
  }
  if (world_ != nullptr) earlier_[world_] = rank_of;
}

void PendingOperations::resume(Engine& next, const std::vector<int>& rank_of) {
  std::vector<std::pair<EntryPtr, Status>> failed;
  Continuations then;
  {
    MutexLock lock(mutex_);
    const std::vector<EntryPtr> entries = take_all();
    renumber(rank_of);
    world_ = &next;
    refusal_ = Status();
    const bool has_ended = early_ == &next;
    suspended_ = has_ended ? std::exchange(left_early_, {}) : Suspended();
    std::uint64_t signals = 0;
    if (!has_ended) (void)!::read(lost_.get(), &signals, sizeof(signals));
    for (const EntryPtr& entry : entries) {
      Status status = renew(*entry, rank_of);
      if (status.ok()) status = give(entry, then);
      if (!status.ok()) failed.emplace_back(entry, std::move(status));
    }
  }
  for (const auto& continuation : then) continuation();
  for (auto& [entry, status] : failed) entry->completion->finish(std::move(status));
}

void PendingOperations::fail(const Status& why) {
  std::vector<EntryPtr> all;
  {
    MutexLock lock(mutex_);
    all = take_all();
    refusal_ = why;
  }
  finish_all(all, why);
}

void PendingOperations::close(const Engine& engine, const Status& why) {
  std::vector<EntryPtr> all;
  {
    MutexLock lock(mutex_);
    note(engine);
    if (world_ != &engine) return;
    all = take_all();
    refusal_ = why;
  }
  finish_all(all, why);
}

Status PendingOperations::admit(const Engine& ended, const EntryPtr& entry) {
  Status status;
  Continuations then;
  {
    MutexLock lock(mutex_);
    if (!refusal_.ok()) return of_call(entry->request, refusal_);
    const auto earlier = earlier_.find(&ended);
    if (earlier != earlier_.end()) HVDLITE_RETURN_IF_ERROR(renew(*entry, earlier->second));
    if (world_ != nullptr && world_ != &ended) {
      status = give(entry, then);
    } else {
      for (const Entry* other : waiting()) {
        if (other->key == entry->key) return duplicate_name(entry->request);
      }
      late_.push_back(entry);
    }
  }
  for (const auto& continuation : then) continuation();
  return status;
}

void PendingOperations::with_present(const std::function<void(Engine&)>& call) {
  MutexLock lock(mutex_);
  if (world_ != nullptr) call(*world_);
}

void PendingOperations::forget(const Engine& engine) {
  MutexLock lock(mutex_);
  note(engine);
  earlier_.erase(&engine);
  if (world_ == &engine) world_ = nullptr;
  if (early_ == &engine) {
    early_ = nullptr;
    left_early_ = Suspended();
  }
}

}  // namespace hvdlite
