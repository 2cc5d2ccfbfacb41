#include "python/gradients.h"

#include <utility>

#include "python/plain_tensors.h"

namespace py = pybind11;

namespace hvdlite {
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
