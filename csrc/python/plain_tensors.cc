#include "python/plain_tensors.h"

#include <optional>
#include <utility>

#include "engine/entry.h"
#include "python/dlpack.h"

namespace py = pybind11;

namespace hvdlite {
namespace {

// What of torch the functions below use. Never destroyed: Python may end before this library does.
struct Torch {
  const dlpack::Exchange* exchange;
  py::object tensor_type;
  py::object dispatch_modes;
  py::object requires_grad = py::str("requires_grad");
  py::object is_neg = py::str("is_neg");
  py::object is_conj = py::str("is_conj");
  py::object untyped_storage = py::str("untyped_storage");
};
const Torch* torch = nullptr;

py::object method_of(PyObject* self, const py::object& name) {
  return result_of(PyObject_CallMethodNoArgs(self, name.ptr()));
}

bool is_false(const py::object& value) { return value.ptr() == Py_False; }

const dlpack::Exchange* exchange_of(const py::object& capsule) {
  const auto* exchange = static_cast<const dlpack::Exchange*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (exchange == nullptr) throw py::error_already_set();
  return exchange->major == dlpack::kMajor && exchange->read != nullptr ? exchange : nullptr;
}

}  // namespace

PlainTensor read_plain(PyObject* tensor, int gpu) {
  require(torch != nullptr &&
          Py_TYPE(tensor) == reinterpret_cast<PyTypeObject*>(torch->tensor_type.ptr()));
  dlpack::Tensor read;
  if (torch->exchange->read(tensor, &read) != 0) {
    PyErr_Clear();  // it has no memory, for example
    throw NotPlain();
  }
  const bool on_host = gpu == kHostMemory;
  require(read.device.type == (on_host ? dlpack::kCpu : dlpack::kCuda));
  require((on_host || read.device.number == gpu) && dlpack::contiguous(read));
  const std::optional<DataType> dtype = dlpack::core_type(read.dtype);
  require(dtype.has_value());
  require(is_false(result_of(PyObject_GetAttr(tensor, torch->requires_grad.ptr()))));
  require(is_false(method_of(tensor, torch->is_neg)));
  if (is_complex(*dtype)) require(is_false(method_of(tensor, torch->is_conj)));
  PlainTensor plain{{}, read.address(), method_of(tensor, torch->untyped_storage)};
  plain.shape.dtype = plain.shape.wire = *dtype;
  plain.shape.dims.assign(read.shape, read.shape + read.dimensions);
  return plain;
}

void* address_of(PyObject* tensor) {
  dlpack::Tensor now;
  if (torch->exchange->read(tensor, &now) != 0) throw py::error_already_set();
  return now.address();
}

bool modes_are_off() {
  require(torch != nullptr);
  return number<long>(call(torch->dispatch_modes).ptr(), &PyLong_AsLong) == 0;
}

bool install_plain_tensors(const py::object& exchange, py::object tensor_type,
                           py::object dispatch_modes) {
  const dlpack::Exchange* const functions = exchange_of(exchange);
  if (functions == nullptr) return false;
  torch = new Torch{functions, std::move(tensor_type), std::move(dispatch_modes)};
  return true;
}

}  // namespace hvdlite
