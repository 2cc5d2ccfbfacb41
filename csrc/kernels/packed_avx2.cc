#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/packed_variants.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace hvdlite::avx2 {
#include "kernels/packed_loops.inc"
}  // namespace hvdlite::avx2
#pragma GCC pop_options
#endif
