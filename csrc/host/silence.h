// Waits for another rank inside a collective that see nothing move, and their errors. Thread: the
// engine's runner.
#pragma once

#include <algorithm>
#include <string>

#include "base/deadline.h"
#include "base/status.h"
#include "transport/fabric.h"

namespace hvdlite {

// How long one wait has seen nothing move: when it is told (Fabric::on_silence), and when it gives
// up.
class Silence {
 public:
  Silence(const Fabric& fabric, Patience patience)
      : fabric_(fabric), patience_(patience), next_(first()) {}

  // Until when to wait before gives_up(), or moved(), is to be called.
  Deadline next() const { return Deadline::after(next_ - lasted_); }
  void moved() {
    lasted_ = Patience::zero();
    next_ = first();
  }
  // Nothing has moved until next(). True: the patience is over. Otherwise this tells of the rank
  // that is waited for; `owes` says what it has not done.
  bool gives_up(int rank, const char* operation, const char* owes) {
    lasted_ = next_;
    if (lasted_ >= patience_) return true;
    next_ = std::min(2 * lasted_, patience_);
    if (fabric_.on_silence) fabric_.on_silence({rank, lasted_, operation, owes});
    return false;
  }

 private:
  Patience first() const { return std::min(fabric_.silence_after, patience_); }

  const Fabric& fabric_;
  const Patience patience_;
  Patience lasted_{0};
  Patience next_;
};

// The errors name the rank, and are final for the backend.

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
