// The mode in which the engine computes: that of a fresh process. It belongs to a thread, and a
// program may change that of its own (torch.set_flush_denormal, a library built with -ffast-math).
// Results must not depend on which thread of which rank computes them.
#pragma once

#include <cfenv>

namespace hvdlite {

// Sets the mode of the calling thread (rounding, subnormals, exceptions), and restores the former
// one at the end of its life, in the same thread.
class PlainFloatingPoint {
 public:
  PlainFloatingPoint() {
    (void)std::fegetenv(&former_);
    (void)std::fesetenv(FE_DFL_ENV);
  }
  ~PlainFloatingPoint() { (void)std::fesetenv(&former_); }
  PlainFloatingPoint(const PlainFloatingPoint&) = delete;
  PlainFloatingPoint& operator=(const PlainFloatingPoint&) = delete;

 private:
  std::fenv_t former_;
};

}  // namespace hvdlite
