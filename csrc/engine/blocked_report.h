// This rank's part in the proof of deadlocks: tells rank 0 that all threads of this rank that could
// submit something wait. deadlock_watch.h is rank 0's part, and says what a report means.
//
// Engine parts own it. Only the runner calls it, except note() and half_of_grace().
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "engine/entry.h"
#include "engine/rank_extension.h"
#include "negotiation/deadlock_watch.h"

namespace hvdlite {

class BlockedReport : public RankExtension {
 public:
  // `submitted` counts the operations that the program has submitted in this world. `ask` makes
  // the runner call report() soon. Any thread may call both.
  BlockedReport(double grace, std::function<std::uint64_t()> submitted, std::function<void()> ask)
      : half_(delay_of(grace / 2)), submitted_(std::move(submitted)), ask_(std::move(ask)) {}

  // Any thread: all threads of this process that could submit wait for these entries; with none of
  // them: not any more. The next submission makes it void. `places` are those of Blocked.
  void note(std::vector<EntryPtr> waits, std::vector<std::string> places = {});
  // How long all these threads have waited before it is noted.
  Patience half_of_grace() const { return half_; }

  bool reports() const override { return true; }
  std::optional<Bytes> report(const Submissions& own) override;
  void world_ended() override;

 private:
  struct Noted {
    std::vector<EntryPtr> waits;
    std::vector<std::string> places;
    std::uint64_t submitted = 0;  // until then
  };
  static Blocked describe(const Noted& noted, const Submissions& own);

  const Patience half_;
  const std::function<std::uint64_t()> submitted_;
  const std::function<void()> ask_;
  Blocked reported_;  // last

  Mutex mutex_;
  bool ended_ HVDLITE_GUARDED_BY(mutex_) = false;
  std::optional<Noted> noted_ HVDLITE_GUARDED_BY(mutex_);  // since the last report()
};

}  // namespace hvdlite
