#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/dtype.h"
#include "kernels/reduce.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HVDLITE_F16C
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace hvdlite::avx2 {
#include "kernels/reduce_loops.inc"
}  // namespace hvdlite::avx2
#pragma GCC pop_options
#endif
