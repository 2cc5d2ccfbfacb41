#include "bindings/gradient_memory.h"

namespace py = pybind11;

namespace hvdlite {

py::dict GradientMemoryObject::cuda_array_interface() const {
  py::dict row;
  row["shape"] = py::make_tuple(memory_->bytes);
  row["typestr"] = "|u1";
  row["data"] = py::make_tuple(memory_->address, /*read-only=*/false);
  row["strides"] = py::none();
  row["version"] = 3;
  return row;
}

void register_gradient_memory(py::module_& module) {
  py::class_<GradientMemoryObject>(module, "GradientMemory", py::is_final())
      .def_property_readonly("__cuda_array_interface__",
                             &GradientMemoryObject::cuda_array_interface);
}

}  // namespace hvdlite
