// The interface through which the timeline sees what the coordinator does. The coordinator borrows
// its observer; only the runner of rank 0's engine calls it.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "wire/message.h"

namespace hvdlite {

class NegotiationObserver {
 public:
  virtual ~NegotiationObserver() = default;
  // A rank has submitted `request`. `number` is that of the pending tensor; `first`: the rank
  // opened it.
  virtual void arrived(std::uint64_t number, const Request& request, int rank,
                       bool first) const = 0;
  // The pending tensor has been answered, with this error or an OK status.
  virtual void answered(std::uint64_t number, const Status& error) const = 0;
};

}  // namespace hvdlite
