// This rank's part in the proof of deadlocks: tells rank 0 that all threads of this rank that could
// submit something wait. deadlock_watch.h is rank 0's part, and says what a report means.
//
// EngineParts own it. Only the runner calls it, except note(), half_of_grace() and asked().
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "engine/tensor_queue.h"
#include "negotiation/deadlock_watch.h"

namespace hvdlite {

// What this rank has submitted in a world of several ranks.
struct Submissions {
  const std::unordered_map<std::string, EntryPtr>& pending;  // Entries without an answer, by key.
  std::uint64_t count = 0;                                   // includes those that have one
  bool quiet = false;  // Nothing that this rank is to run or to read is waiting.
};

class BlockedReport {
 public:
  // `queue` is borrowed, and knows how many operations the program has submitted in this world.
  BlockedReport(double grace, TensorQueue& queue) : half_(delay_of(grace / 2)), queue_(queue) {}
  // Before the engine takes entries: how it wakes the runner, from any thread.
  void set_wake_runner(std::function<void()> wake) { wake_runner_ = std::move(wake); }

  // Any thread: all threads of this process that could submit wait for these entries; with none of
  // them: not any more. The next submission makes it void. `places` are those of Blocked.
  void note(std::vector<EntryPtr> waits, std::vector<std::string> places = {});
  // How long all these threads have waited before it is noted.
  Patience half_of_grace() const { return half_; }

  // Whether the runner shall call report(), once. Any thread asks the first.
  bool asked() const { return asked_.load(std::memory_order_seq_cst); }
  bool take_asked() { return asked() && asked_.exchange(false); }
  // What is new for rank 0, which comes behind these submissions.
  std::optional<Bytes> report(const Submissions& own);
  void world_ended();

 private:
  struct Noted {
    std::vector<EntryPtr> waits;
    std::vector<std::string> places;
    std::uint64_t submitted = 0;  // until then
  };
  static Blocked describe(const Noted& noted, const Submissions& own);

  const Patience half_;
  TensorQueue& queue_;
  std::function<void()> wake_runner_;
  std::atomic<bool> asked_{false};
  Blocked reported_;  // last

  Mutex mutex_;
  bool ended_ HVDLITE_GUARDED_BY(mutex_) = false;
  std::optional<Noted> noted_ HVDLITE_GUARDED_BY(mutex_);  // since the last report()
};

}  // namespace hvdlite
