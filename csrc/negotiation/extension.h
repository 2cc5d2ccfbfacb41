// An optional feature of the negotiation, as rank 0's coordinator sees it. The coordinator calls
// each extension that it was given (Coordinator::add) and knows none of them by name.
//
// A request may have terms on which it does not wait for all members (Request::waits_for_all()).
// One extension *decides* about such tensors: it says when each of them is answered, and for whom.
// One extension *reads reports* of its counterparts, the extensions of the ranks' engines
// (engine/rank_extension.h).
//
// Every hook does nothing unless an extension overrides it. Only the runner of rank 0 calls them. A
// hook may call the coordinator, which may then answer or fail any pending tensor. The coordinator
// borrows its extensions; they have no clock and do no I/O. A tensor that waits for all members
// costs no call, except answered() where an extension reads arrivals.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "negotiation/pending_table.h"
#include "wire/message.h"

namespace hvdlite {

// A line for the log, which the live view shows as an event.
struct Notice {
  std::string event;  // "stall", "late"
  int rank = -1;      // the rank that it is about, or -1
  std::string name;   // It names the tensor, or is empty.
  std::string text;
};

class Extension {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  Extension() = default;
  virtual ~Extension() = default;
  Extension(const Extension&) = delete;
  Extension& operator=(const Extension&) = delete;

  // Whether it decides about tensors that do not wait for all. The coordinator asks once.
  virtual bool decides() const { return false; }

  // The coordinator calls the next four only where the extension decides. `member` is a position in
  // the process set.
  // A member submits a request, which is not counted yet. True: the tensor was answered without
  // the member before, and there is nothing else to do.
  virtual bool take(PendingTable& /*table*/, std::size_t /*member*/, const Request& /*request*/,
                    TimePoint /*now*/) {
    return false;
  }
  // The request was counted in this tensor: answers what can be answered now.
  virtual void submitted(PendingTable& /*table*/, PendingTensor& /*pending*/,
                         std::size_t /*member*/, const Request& /*request*/, TimePoint /*now*/) {}
  // Whether the tensor waits for the member, which has not submitted it.
  virtual bool awaits(const PendingTable& /*table*/, const PendingTensor& /*pending*/,
                      std::size_t /*member*/) const {
    return true;
  }
  // The tensor is answered: writes to the response what it says of the members left out.
  virtual void complete(const PendingTable& /*table*/, const PendingTensor& /*pending*/,
                        Response& /*response*/) {}

  // Whether answered() is called for tensors that are of_a_step(). The coordinator asks once.
  virtual bool reads_arrivals() const { return false; }
  // The tensor is answered without an error. It says when each rank's program submitted it.
  virtual void answered(PendingTensor& /*pending*/, const Response& /*response*/, TimePoint /*now*/,
                        std::vector<Notice>& /*notices*/) {}

  // Whether it reads what its counterparts on the ranks report. The coordinator asks once.
  virtual bool reads_reports() const { return false; }
  // The counterpart on this rank has reported this (RankExtension::report()). False: it cannot be
  // read.
  virtual bool reported(int /*rank*/, std::span<const std::byte> /*body*/, TimePoint /*now*/) {
    return false;
  }
  // A rank has joined. All ranks have joined, and take part again. A process set is gone.
  virtual void joined(int /*rank*/, TimePoint /*now*/) {}
  virtual void all_joined() {}
  virtual void forget(std::uint32_t /*set*/) {}

  // When tick() has something to do though nothing else happens.
  virtual std::optional<TimePoint> due() const { return std::nullopt; }
  // Time has passed. The coordinator calls it often while something is pending, and once when
  // nothing is any more.
  virtual void tick(TimePoint /*now*/, std::vector<Notice>& /*notices*/) {}
};

}  // namespace hvdlite
