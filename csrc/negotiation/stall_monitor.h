// Says which tensors wait for which ranks, and what those ranks did last: the first thing to know
// when a job stands still. It looks at the pending tensors a few times a second at most, and never
// touches the fast path. The coordinator owns it, and only the runner of rank 0 calls it.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/config.h"
#include "base/mutex.h"
#include "negotiation/pending_table.h"

namespace hvdlite {

class Coordinator;

// What waits for ranks just now, for people who look: the runner of rank 0 finds it a few times a
// second at most and any thread reads it, because the coordinator's tables are the runner's alone.
struct Stall {
  std::string name;
  std::chrono::steady_clock::time_point since;
  std::vector<int> submitted;  // the ranks that wait in it
  std::vector<int> missing;    // those that it waits for
};

// LiveFigures owns it.
class Stalls {
 public:
  static constexpr std::size_t kMost = 8;
  static constexpr std::chrono::seconds kShortest{1};  // what waits less long is nothing unusual

  // Keeps those that have waited the longest. Rank 0's runner.
  void find(Coordinator& coordinator, std::chrono::steady_clock::time_point now);
  // Nothing waits.
  void clear() { set({}); }
  // The longest first. Any thread.
  std::vector<Stall> get() const;

 private:
  void set(std::vector<Stall> found);

  mutable Mutex mutex_;
  std::vector<Stall> stalls_ HVDLITE_GUARDED_BY(mutex_);
  bool empty_ = true;  // the runner's
};

class StallMonitor {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // `coordinator` and `stalls` are borrowed. It keeps `stalls` up to date, which may be null.
  StallMonitor(const Config& config, Coordinator& coordinator, Stalls* stalls)
      : warning_(config.stall_warning),
        shutdown_(config.stall_shutdown),
        coordinator_(coordinator),
        stalls_(stalls) {}

  // Warnings that are due at `now`: of each tensor after stall_warning, and again whenever it has
  // waited twice as long. Fails what has waited past stall_shutdown.
  std::vector<Notice> check(TimePoint now);
  // Checks a few times a second while something is pending.
  TimePoint due() const { return next_check_; }
  void tick(TimePoint now, std::vector<Notice>& notices);

 private:
  std::chrono::milliseconds interval() const;
  std::string describe_stall(const PendingTable& table, const PendingTensor& pending,
                             TimePoint now) const;
  // Where a rank that is missing in the tensor waits itself for one that has submitted it, as at
  // the end of loops of different lengths: where, and what to do. Otherwise nothing.
  std::string describe_mutual_wait(const PendingTable& table, const PendingTensor& pending) const;
  double warning_;
  double shutdown_;
  Coordinator& coordinator_;
  Stalls* const stalls_;
  TimePoint next_check_;
  std::unordered_map<std::uint64_t, TimePoint> warned_;  // The key is PendingTensor::number.
};

}  // namespace hvdlite
