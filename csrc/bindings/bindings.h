// One function per file of this folder, each adding its part to the module `_core`.
#pragma once

#include <pybind11/pybind11.h>

#include "base/status.h"

namespace hvdlite {

void register_tables(pybind11::module_& module);  // dtypes, ops, knobs, measurements
void register_gpu(pybind11::module_& module);     // what GPUs could be used
void register_engine(pybind11::module_& module);  // Tensor, Handle, Engine

// Raises the class of hvdlite.errors for this code, with `failed_rank` set. Needs the GIL.
[[noreturn]] void raise_status(const Status& status);
inline void raise_if_error(const Status& status) {
  if (!status.ok()) raise_status(status);
}

}  // namespace hvdlite
