#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/packed_variants.h"
#include "os/cpu.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace hvdlite::avx2 {
#include "kernels/packed_loops.inc"
}  // namespace hvdlite::avx2
#pragma GCC pop_options
#endif

namespace hvdlite {

const PackedLoops& best_packed_loops() {
#if defined(__x86_64__)
  if (cpu_features().avx2_f16c) return avx2::kPackedLoops;
#endif
  return portable::kPackedLoops;
}

}  // namespace hvdlite
