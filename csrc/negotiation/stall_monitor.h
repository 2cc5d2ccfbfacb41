// Says which tensors wait for which ranks, and what those ranks did last: the first thing to know
// when a job stands still. It looks at the pending tensors a few times a second at most, and
// never touches the fast path. Rank 0's negotiator owns it, and only the runner calls it.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "base/config.h"
#include "negotiation/coordinator.h"

namespace hvdlite {

class StallMonitor {
 public:
  struct Warning {
    std::string name;  // of the tensor
    int rank = -1;     // one that is waited for
    std::string text;
  };

  StallMonitor(const Config& config, Coordinator& coordinator)
      : warning_(config.stall_warning),
        shutdown_(config.stall_shutdown),
        coordinator_(coordinator) {}

  // Warnings that are due at `now`: of each tensor after stall_warning, and again whenever it has
  // waited twice as long. Fails what has waited past stall_shutdown, and changes of the
  // process sets that have waited past stall_warning for ranks that wait for those that make them.
  std::vector<Warning> check(Coordinator::TimePoint now);
  // What a rank has submitted last, for a message: "last submitted 'x' 2.0 s ago".
  std::string describe_last(int rank, Coordinator::TimePoint now) const;
  // How long the runner may sleep before check() has something to do.
  std::chrono::milliseconds interval() const;

 private:
  std::string describe_stall(const PendingTable& table, const PendingTensor& pending,
                             Coordinator::TimePoint now) const;
  void fail_circular_changes(Coordinator::TimePoint now);
  // Where a rank that is missing in the tensor waits itself for one that has submitted it, as at
  // the end of loops of different lengths: where, and what to do. Otherwise nothing.
  std::string describe_mutual_wait(const PendingTable& table, const PendingTensor& pending) const;
  double warning_;
  double shutdown_;
  Coordinator& coordinator_;  // borrowed from the negotiator, which owns both
};

}  // namespace hvdlite
