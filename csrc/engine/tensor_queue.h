// Where submitted collectives wait for the runner: the only way from callers to the engine.
//
// Any thread pushes; the runner takes all at once. The queue knows which names are in flight on
// this rank, so that a duplicate is refused at the call; so is everything while this rank waits in
// a join. It is closed with a status once the engine can do no more. The engine owns it; its mutex
// is never held while another one is taken.
#pragma once

#include <atomic>
#include <cstdint>
#include <unordered_set>
#include <vector>

#include "base/mutex.h"
#include "engine/entry.h"
#include "engine/timeline.h"

namespace hvdlite {

class TensorQueue {
 public:
  explicit TensorQueue(const Timeline& timeline) : timeline_(timeline) {}  // borrowed

  // kDuplicateName when the name is in flight; kInvalidArgument during a join and when its process
  // set is being removed; the closing status once closed. What a removal removes is refused from
  // then on.
  Status push(EntryPtr entry);
  // The removal of the set has failed: pushes for it are taken again.
  void reopen(std::uint32_t process_set);
  // How many entries were pushed so far. Any thread.
  std::uint64_t pushed();
  // Returns everything pushed since the last call, in order. Runner only.
  std::vector<EntryPtr> take();
  // Racy by nature: a hint for a spinning runner.
  bool empty() const { return !waiting_.load(std::memory_order_seq_cst); }

  // Ends an entry: its name is free again before its waiters wake. Runner only.
  void finish(const EntryPtr& entry, Status status);
  // Refuses every later push with `status` (the first close wins); returns what was not yet taken.
  std::vector<EntryPtr> close(const Status& status);

 private:
  const Timeline& timeline_;
  std::atomic<bool> waiting_{false};

  Mutex mutex_;  // guards what follows
  std::vector<EntryPtr> entries_ HVDLITE_GUARDED_BY(mutex_);
  std::uint64_t pushed_ HVDLITE_GUARDED_BY(mutex_) = 0;  // entries so far
  std::unordered_set<std::string> in_flight_ HVDLITE_GUARDED_BY(mutex_);
  bool joining_ HVDLITE_GUARDED_BY(mutex_) = false;
  std::unordered_set<std::uint32_t> removed_ HVDLITE_GUARDED_BY(mutex_);  // process sets
  Status closed_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
