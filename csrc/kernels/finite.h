// Finds infinities and NaN in memory, which need not be aligned. A pure function; any thread.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hvdlite {

// Returns the first i below `count` for which factor * source[i], cast to types.wire, is infinite
// or NaN; `count` if there is none. Both types are floating-point, or the same complex one.
std::size_t first_nonfinite(ElementTypes types, const void* source, std::size_t count,
                            double factor);

}  // namespace hvdlite
