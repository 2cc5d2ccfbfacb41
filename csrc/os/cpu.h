// What the processor offers to this process.
#pragma once

namespace hvdlite {

// Processors that this process may run on (its affinity mask), at least 1.
int available_cores();

struct CpuFeatures {
  bool avx2_f16c = false;
  bool avx512f = false;
};
CpuFeatures cpu_features();

// Tells the processor that this is a spin loop.
void cpu_pause();

}  // namespace hvdlite
