// The processors that this process may use, their instruction sets and how they compute. Any
// thread.
#pragma once

#include <cfenv>
#include <string>

namespace hvdlite {

// The number of processors that this process may use, at least 1: those of its affinity mask, or
// fewer where its cgroup, or one above it, has a quota of processor time (a container's limit).
int available_cores();

// The number of whole processors that the strictest quota leaves to a process, at least 1; 0 when
// there is no quota. `cgroups` is the folder where cgroups of version 1 or 2 are mounted, and
// `membership` the text of the process's /proc/PID/cgroup.
int quota_cores(const std::string& cgroups, const std::string& membership);

// Whether the processor has the instruction sets AVX2 and F16C.
bool has_avx2_f16c();

// Tells the processor that the caller is in a spin loop.
void cpu_pause();

// Sets the floating-point mode of the calling thread (rounding, subnormals, exceptions) to that of
// a fresh process, in which the engine computes, and restores the former one at the end of its
// life, in the same thread. A program may change the mode of its own threads
// (torch.set_flush_denormal, a library built with -ffast-math), and results must not depend on
// which thread of which rank computes them.
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
