// Reads plain torch tensors without Python's way (hvdlite/torch/collectives), which takes any
// tensor and costs many times what the engine needs: contiguous tensors of the class torch.Tensor
// that do not require a gradient, in host memory or that of an NVIDIA GPU.
//
// Torch's tensor type lends its memory and shape by DLPack's C interface. What keeps the
// memory alive while the core uses it is the tensor's storage, and not the tensor: a script may
// give the tensor other memory meanwhile. All functions need the GIL, which guards all state.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

#include "python/bindings.h"
#include "python/handle.h"
#include "wire/message.h"

namespace hvdlite {

// Thrown where Python's way must take the call, which has had no effect yet. Not an error.
struct NotPlain {};

inline void require(bool condition) {
  if (!condition) throw NotPlain();
}

// The result of a call of Python's. Its errors are those that Python's way would meet, or come from
// a signal handler: nobody else would raise them again.
inline pybind11::object result_of(PyObject* result) {
  if (result == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

// Calls a function that may be Python's.
template <typename... Arguments>
pybind11::object call(const pybind11::object& function, const Arguments&... arguments) {
  PyObject* result = nullptr;
  asleep_at_the_end([&] {
    result =
        PyObject_CallFunctionObjArgs(function.ptr(), pybind11::handle(arguments).ptr()..., nullptr);
  });
  return result_of(result);
}

template <typename Number>
Number number(PyObject* value, Number (*convert)(PyObject*)) {
  const Number converted = convert(value);
  if (converted == static_cast<Number>(-1) && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw NotPlain();
  }
  return converted;
}

struct PlainTensor {
  TensorShape shape;  // without a name
  void* address;
  pybind11::object storage;  // keeps the memory alive
};

// Throws NotPlain where the tensor is anything else, or lies elsewhere than on this GPU (or in host
// memory: kHostMemory).
PlainTensor read_plain(PyObject* tensor, int gpu);

// Where the memory of a plain tensor lies now. Throws Python's error if it has none.
void* address_of(PyObject* tensor);

// Whether no torch dispatch mode is on. Such a mode may stand for other tensors, or note down what
// happens to them. Throws NotPlain where nothing is installed.
bool modes_are_off();

// Begins to read tensors, once. False where this torch has another interface.
//   exchange:        the capsule of DLPack's functions
//   tensor_type:     torch.Tensor
//   dispatch_modes:  returns how many modes look at every operation of torch
bool install_plain_tensors(const pybind11::object& exchange, pybind11::object tensor_type,
                           pybind11::object dispatch_modes);

// The gradients of a bucket while they are reduced where they lie: they are read in one call, and
// what `hvdlite/torch/buckets.py` does for each gradient otherwise is not needed.
//
// All methods need the GIL. The object keeps the memory alive, so it has to live until the
// operation has ended.
class Gradients {
 public:
  // Reads the gradients of parameters, and lets each of `tensors` say where that of its parameter
  // lies. `tensors` have the names, shapes and dtypes of the parameters. Throws NotPlain unless
  // every parameter has a gradient that is plain, and of that shape and dtype.
  static std::unique_ptr<Gradients> read(pybind11::list params,
                                         const std::vector<TensorArgument*>& tensors);

  pybind11::list gradients() const;

  // The position of the first parameter whose gradient was replaced or written since, by the
  // script; -1 if there is none. What the core writes does not count.
  int first_changed() const;

 private:
  struct One {
    pybind11::object gradient;
    pybind11::object storage;
    void* address;
    long version;
  };

  explicit Gradients(pybind11::list params) : params_(std::move(params)) {}

  const pybind11::list params_;
  std::vector<One> all_;
};

}  // namespace hvdlite
