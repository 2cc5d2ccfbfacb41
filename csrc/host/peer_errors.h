// The errors of waits for another rank inside a collective. They name the rank, and are final for
// the backend. Any thread.
#pragma once

#include <string>

#include "base/status.h"

namespace hvdlite {

// The rank's process or its connection is gone; `why` says more, where it is known.
inline Status lost_peer(int rank, const char* operation, const std::string& why = "") {
  return Status(StatusCode::kRankFailed,
                "rank " + std::to_string(rank) + " was lost during " + operation + why +
                    "; see the launcher's report",
                rank);
}

// The rank is there, and what it owes has not come for collective_timeout.
inline Status silent_peer(int rank, const char* operation) {
  return Status(StatusCode::kTimeout,
                "rank " + std::to_string(rank) +
                    " stopped making progress inside this collective (" + operation +
                    ") for longer than collective_timeout; is it suspended or overloaded, or its "
                    "link down?",
                rank);
}

}  // namespace hvdlite
