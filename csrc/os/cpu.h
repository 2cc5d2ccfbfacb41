// What the processor offers to this process.
#pragma once

#include <string>

namespace hvdlite {

// Processors that this process may use, at least 1: those of its affinity mask, or fewer where its
// cgroup, or one above it, has a quota of processor time (a container's limit).
int available_cores();

// Whole processors that the strictest quota leaves to a process, at least 1; 0 where there is none.
// `cgroups` is the folder where cgroups are mounted, of version 1 or 2, and `membership` the text
// of the process's /proc/PID/cgroup.
int quota_cores(const std::string& cgroups, const std::string& membership);

struct CpuFeatures {
  bool avx2_f16c = false;
  bool avx512f = false;
};
CpuFeatures cpu_features();

// Tells the processor that this is a spin loop.
void cpu_pause();

}  // namespace hvdlite
