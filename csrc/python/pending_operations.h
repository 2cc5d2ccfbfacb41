// The pending operations as Python's membership thread holds them, see engine/pending_operations.h.
// Any thread that holds the GIL may call them; they release the GIL while they end or submit
// collectives.
#pragma once

#include <pybind11/pybind11.h>

namespace hvdlite {

void register_pending_operations(pybind11::module_& module);

}  // namespace hvdlite
