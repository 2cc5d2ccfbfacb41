// How long a wait for other ranks inside a collective has seen nothing move: when it is told
// (Fabric::on_silence), and when it gives up. A value of one wait; thread: the engine's runner.
#pragma once

#include <algorithm>

#include "base/deadline.h"
#include "transport/fabric.h"

namespace hvdlite {

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

}  // namespace hvdlite
