#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/packed_variants.h"

namespace hvdlite::portable {
#include "kernels/packed_loops.inc"
}  // namespace hvdlite::portable
