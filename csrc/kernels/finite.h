// Finds infinities and NaN. A pure function of memory, any thread; addresses as for reduce.h.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hvdlite {

// The first of `count` elements for which factor * source[i], cast to types.wire, is infinite or
// NaN; `count` if none is. Floating-point and complex types.
std::size_t first_nonfinite(ElementTypes types, const void* source, std::size_t count,
                            double factor);

}  // namespace hvdlite
