// The processors that this process may use, and their instruction sets. Any thread.
#pragma once

#include <string>

namespace hvdlite {

// The number of processors that this process may use, at least 1: those of its affinity mask, or
// fewer where its cgroup, or one above it, has a quota of processor time (a container's limit).
int available_cores();

// The number of whole processors that the strictest quota leaves to a process, at least 1; 0 when
// there is no quota. `cgroups` is the folder where cgroups of version 1 or 2 are mounted, and
// `membership` the text of the process's /proc/PID/cgroup.
int quota_cores(const std::string& cgroups, const std::string& membership);

struct CpuFeatures {
  bool avx2_f16c = false;
};
CpuFeatures cpu_features();

// Tells the processor that the caller is in a spin loop.
void cpu_pause();

}  // namespace hvdlite
