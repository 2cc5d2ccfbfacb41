// The functions that add the parts of the Python module `_core`, one for each file of this folder.
// All of them need the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include "base/status.h"

namespace hvdlite {

void register_tables(pybind11::module_& module);          // dtypes, ops, knobs, measurements
void register_gpu(pybind11::module_& module);             // what GPUs could be used
void register_engine(pybind11::module_& module);          // Tensor, Handle, Engine
void register_fast_path(pybind11::module_& module);       // the fast path of torch's collectives
void register_late_gradients(pybind11::module_& module);  // their terms, and who was late

// Raises the class of hvdlite.errors that belongs to the status's code, with `failed_rank` set.
[[noreturn]] void raise_status(const Status& status);
inline void raise_if_error(const Status& status) {
  if (!status.ok()) raise_status(status);
}

}  // namespace hvdlite
