#include "python/gradient_memory.h"

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

py::buffer_info SharedGradientMemoryObject::bytes() const {
  return {reinterpret_cast<std::uint8_t*>(part_->data()), static_cast<py::ssize_t>(part_->size())};
}

void register_gradient_memory(py::module_& module) {
  py::class_<GradientMemoryObject>(module, "GradientMemory", py::is_final())
      .def_property_readonly("__cuda_array_interface__",
                             &GradientMemoryObject::cuda_array_interface);
  py::class_<SharedGradientMemoryObject>(module, "SharedGradientMemory", py::is_final(),
                                         py::buffer_protocol())
      .def_buffer(&SharedGradientMemoryObject::bytes);
}

}  // namespace hvdlite
