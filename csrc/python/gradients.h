// The gradients of a bucket while they are reduced where they lie: they are read in one call, and
// what `hvdlite/torch/buckets.py` does for each gradient otherwise is not needed.
//
// All methods need the GIL. The object keeps the memory alive, so it has to live until the
// operation has ended.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

#include "python/tensor_argument.h"

namespace hvdlite {

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
