// The pending tensors of one process set: what some of its members have submitted, and what the
// coordinator has not answered yet.
//
// The coordinator owns one table for each process set. Only the runner of rank 0 reads and writes
// it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "transport/topology.h"
#include "wire/message.h"

namespace hvdlite {

// A line for the log, which the live view shows as an event.
struct Notice {
  std::string event;  // "stall", "late"
  int rank = -1;      // the rank that it is about, or -1
  std::string name;   // It names the tensor, or is empty.
  std::string text;
};

// When a rank submitted an all-reduce, or the several that travelled with it, or those of a step.
// All moments are on rank 0's clock.
struct Arrival {
  using TimePoint = std::chrono::steady_clock::time_point;
  TimePoint first{};
  TimePoint last{};
  // The program has waited for results between its all-reduce before and this one.
  bool after_wait = false;
  bool came() const { return last != TimePoint(); }
  void include(const Arrival& other) {
    if (!other.came()) return;
    first = came() ? std::min(first, other.first) : other.first;
    last = std::max(last, other.last);
  }
};

// Which members of the set have submitted a name; of a send, which of its two ranks have.
struct PendingTensor {
  using TimePoint = std::chrono::steady_clock::time_point;

  std::uint64_t number = 0;  // counts the pending tensors of the world
  Request request;           // as the first rank submitted it
  int first_rank = -1;
  Presence submitted;              // The index is a position in the set.
  std::size_t missing = 0;         // members concerned that have neither submitted nor joined
  std::vector<Request> differing;  // where rows_differ(): by position in the set
  Status refusal;                  // the first mismatch
  std::vector<Arrival> arrivals;   // Each rank has one, where the step clock reads them.
  TimePoint since;
};

struct PendingTable {
  Group group;
  std::unordered_map<std::string, PendingTensor> tensors;  // The key is Request::key().
  std::vector<int> absent;                                 // The last response named them.
  std::uint32_t generation = 0;                            // The group without them has it.
};

}  // namespace hvdlite
