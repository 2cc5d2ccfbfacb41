#include "python/plain_tensors.h"

#include <cstdint>
#include <optional>
#include <utility>

#include "base/dtype.h"
#include "engine/entry.h"

namespace py = pybind11;

namespace hvdlite {

// The part of DLPack's C exchange interface, version 1, that reads a tensor without Python calls.
//
// A framework's tensor type has the attribute `__dlpack_c_exchange_api__`: a capsule that holds the
// address of a table of functions, which lives as long as the process. The layouts are DLPack's:
// https://dmlc.github.io/dlpack/latest/c_api.html
namespace dlpack {

struct Device {
  std::int32_t type;
  std::int32_t number;
};
inline constexpr std::int32_t kCpu = 1;   // host memory
inline constexpr std::int32_t kCuda = 2;  // It is the memory of an NVIDIA GPU.

struct ElementType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t dimensions;
  ElementType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: contiguous
  std::uint64_t byte_offset;

  void* address() const { return static_cast<char*>(data) + byte_offset; }
};

struct Exchange {
  std::uint32_t major;
  std::uint32_t minor;
  const Exchange* previous;
  void* allocate;
  void* share;
  void* adopt;
  // Fills in `out`, whose arrays the object keeps; -1 with a Python error. Needs the GIL.
  int (*read)(void* object, Tensor* out);
  void* stream;
};
inline constexpr std::uint32_t kMajor = 1;
inline constexpr const char* kCapsuleName = "dlpack_exchange_api";

// Nothing where the core has no such type, or this interface has no common name for it.
inline std::optional<DataType> core_type(ElementType type) {
  struct Row {
    std::uint8_t code, bits;
    DataType dtype;
  };
  constexpr std::uint8_t kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6;
  constexpr Row kRows[] = {
      {kFloat, 32, DataType::kFloat32},     {kFloat, 16, DataType::kFloat16},
      {kFloat, 64, DataType::kFloat64},     {kBfloat, 16, DataType::kBfloat16},
      {kInt, 64, DataType::kInt64},         {kInt, 32, DataType::kInt32},
      {kInt, 16, DataType::kInt16},         {kInt, 8, DataType::kInt8},
      {kUint, 8, DataType::kUint8},         {kUint, 16, DataType::kUint16},
      {kUint, 32, DataType::kUint32},       {kUint, 64, DataType::kUint64},
      {kComplex, 64, DataType::kComplex64}, {kComplex, 128, DataType::kComplex128},
      {kComplex, 32, DataType::kComplex32}, {kBool, 8, DataType::kBool},
  };
  for (const Row& row : kRows) {
    if (row.code == type.code && row.bits == type.bits && type.lanes == 1) return row.dtype;
  }
  return std::nullopt;
}

inline bool contiguous(const Tensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t expected = 1;
  bool fits = true;
  for (std::int32_t i = tensor.dimensions - 1; i >= 0; --i) {
    if (tensor.shape[i] == 0) return true;
    fits = fits && (tensor.shape[i] == 1 || tensor.strides[i] == expected);
    expected *= tensor.shape[i];
  }
  return fits;
}

}  // namespace dlpack

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

namespace {

py::object attribute(py::handle object, const py::object& name) {
  return result_of(PyObject_GetAttr(object.ptr(), name.ptr()));
}

// These names are never destroyed: Python may end before this library does.

py::object grad_of(py::handle param) {
  static const auto* const kName = new py::object(py::str("grad"));
  return attribute(param, *kName);
}

long version_of(const py::object& gradient) {
  static const auto* const kName = new py::object(py::str("_version"));
  return number<long>(attribute(gradient, *kName).ptr(), &PyLong_AsLong);
}

}  // namespace

std::unique_ptr<Gradients> Gradients::read(py::list params,
                                           const std::vector<TensorArgument*>& tensors) {
  require(params.size() == tensors.size());
  std::unique_ptr<Gradients> gradients(new Gradients(std::move(params)));
  gradients->all_.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    py::object gradient = grad_of(gradients->params_[i]);
    require(!gradient.is_none());
    TensorArgument& tensor = *tensors[i];
    PlainTensor plain = read_plain(gradient.ptr(), tensor.gpu);
    require(plain.shape.dtype == tensor.shape.dtype && plain.shape.dims == tensor.shape.dims);
    tensor.input = tensor.output = plain.address;
    const long version = version_of(gradient);
    gradients->all_.push_back(
        {std::move(gradient), std::move(plain.storage), plain.address, version});
  }
  return gradients;
}

py::list Gradients::gradients() const {
  py::list gradients;
  for (const One& one : all_) gradients.append(one.gradient);
  return gradients;
}

int Gradients::first_changed() const {
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const One& one = all_[i];
    const py::object now = grad_of(params_[i]);
    const bool same = now.is(one.gradient) && version_of(now) == one.version &&
                      address_of(now.ptr()) == one.address;
    if (!same) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace hvdlite
