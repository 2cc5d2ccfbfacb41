// A simulated world: the negotiation of many ranks, and nothing else of them, in one thread. Its
// ranks are real negotiators with the real coordinator, over in-process channels where they need
// one; there is no data plane. So worlds of a thousand ranks fit into a test.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/negotiator.h"
#include "engine/parts.h"

namespace hvdlite {

class NegotiationWorld {
 public:
  // `host_of`: by rank. Leaders hold what they pass up until it is complete, however long that is.
  // kInternal names a system call: each rank takes two descriptors.
  static Result<std::unique_ptr<NegotiationWorld>> make(const std::vector<int>& host_of,
                                                        bool control_tree);

  // Every rank submits an all-reduce of each name at once. Returns how often every rank had to look
  // at its channels until all of them agreed on everything; 0: an error, or never.
  int negotiate(const std::vector<std::string>& names);
  int size() const { return static_cast<int>(ranks_.size()); }
  // What went over a rank's channels so far.
  const ControlTraffic& traffic(int rank) const { return ranks_[rank].negotiator->traffic(); }
  // The time that rank 0 has spent in its negotiator.
  std::chrono::nanoseconds busy_at_rank_0() const { return busy_; }

 private:
  struct Rank {
    std::unique_ptr<EngineParts> parts;
    std::unique_ptr<Negotiator> negotiator;
  };
  Status connect(const std::vector<int>& host_of, bool control_tree);

  std::vector<Fd> events_;
  std::vector<Rank> ranks_;
  std::chrono::nanoseconds busy_{0};
};

}  // namespace hvdlite
