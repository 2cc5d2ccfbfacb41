#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/half.h"
#include "collective/reduce.h"
#include "collective/reduce_variants.h"

namespace hvdlite::portable {
#include "collective/reduce_loops.inc"
}  // namespace hvdlite::portable
