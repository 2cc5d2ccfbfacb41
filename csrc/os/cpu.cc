#include "os/cpu.h"

#include <sched.h>

namespace hvdlite {

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  const int count = CPU_COUNT(&set);
  return count > 0 ? count : 1;
}

CpuFeatures cpu_features() {
  CpuFeatures features;
#if defined(__x86_64__)
  features.avx2_f16c = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  features.avx512f = __builtin_cpu_supports("avx512f");
#endif
  return features;
}

void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace hvdlite
