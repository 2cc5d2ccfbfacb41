#include "bindings/slot.h"

namespace py = pybind11;

namespace hvdlite {

py::dict SlotObject::cuda_array_interface() const {
  py::dict row;
  row["shape"] = py::make_tuple(slot_->bytes);
  row["typestr"] = "|u1";
  row["data"] = py::make_tuple(slot_->address, /*read-only=*/false);
  row["strides"] = py::none();
  row["version"] = 3;
  return row;
}

void register_slot(py::module_& module) {
  py::class_<SlotObject>(module, "Slot", py::is_final())
      .def_property_readonly("__cuda_array_interface__", &SlotObject::cuda_array_interface);
}

}  // namespace hvdlite
