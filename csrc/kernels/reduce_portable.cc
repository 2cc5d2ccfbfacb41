#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/dtype.h"
#include "kernels/reduce.h"
#include "kernels/reduce_variants.h"

namespace hvdlite::portable {
#include "kernels/reduce_loops.inc"
}  // namespace hvdlite::portable
