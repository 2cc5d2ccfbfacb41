// The fast path: collectives of ordinary torch tensors in host memory, in one call of a C function.
//
// A public function of hvdlite/torch/collectives asks here first. Where anything about the call is
// unusual, a function of this file returns None before it has had any effect, and Python's way goes
// on: it does the same thing, or it raises the error. So this file has no error messages of its
// own. The GIL guards its state.
#include <Python.h>
#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/entry.h"
#include "python/handle.h"
#include "python/plain_tensors.h"

namespace py = pybind11;

namespace hvdlite {
namespace {

// What of Python the fast path uses. Never destroyed: Python may end before this library does.
struct Callbacks {
  py::object increment_version;  // tells autograd that tensors were overwritten
  py::object empty_like;
  py::object engine;       // returns the engine of this process
  py::object world_set;    // the process set of all ranks
  py::object member_id;    // returns the number of a process set
  py::object next_name;    // numbers a call without a name
  py::object raise_moved;  // takes a name; raises the error of a tensor that has other memory now
};
const Callbacks* python = nullptr;
bool is_on = false;

double scale_of(PyObject* value) {
  require(PyFloat_CheckExact(value) || PyLong_CheckExact(value));
  return number<double>(value, &PyFloat_AsDouble);
}

std::string text_of(PyObject* text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text, &size);
  if (bytes == nullptr) {
    PyErr_Clear();
    throw NotPlain();
  }
  return std::string(bytes, static_cast<std::size_t>(size));
}

// As ops.choose_op().
int op_of(PyObject* average, PyObject* op) {
  if (average == Py_True || average == Py_False) {
    require(op == Py_None);
    return static_cast<int>(average == Py_True ? ReduceOp::kAverage : ReduceOp::kSum);
  }
  require(average == Py_None);
  if (op == Py_None) return static_cast<int>(ReduceOp::kAverage);
  require(PyLong_Check(op) && !PyBool_Check(op));
  const long chosen = number<long>(op, &PyLong_AsLong);
  require(chosen >= 0 && is_valid_op(static_cast<int>(chosen)));
  return static_cast<int>(chosen);
}

// How a public function returns its result; Python gives the numbers.
struct Form {
  bool in_place;
  bool blocking;
};

Form form_of(PyObject* bits) {
  const long number = PyLong_AsLong(bits);
  return {(number & 1) != 0, (number & 2) != 0};
}

// One tensor of a call.
struct Part {
  py::object tensor;
  py::object storage;  // keeps the memory of the tensor alive
  py::object result;   // the tensor itself, or a new one
  const void* input;
  void* output;
  TensorShape shape;
};

Part part_of(py::object tensor, bool in_place) {
  PlainTensor plain = read_plain(tensor.ptr(), kHostMemory);
  Part part;
  part.storage = std::move(plain.storage);
  part.shape = std::move(plain.shape);
  part.input = part.output = plain.address;
  if (in_place) {
    part.result = tensor;
  } else {
    part.result = call(python->empty_like, tensor);
    part.output = read_plain(part.result.ptr(), kHostMemory).address;
  }
  part.tensor = std::move(tensor);
  return part;
}

// Where a call goes.
struct Target {
  std::shared_ptr<EngineHolder> holder;
  std::uint32_t process_set = 0;
};

Target target_of(PyObject* process_set) {
  const py::object engine = call(python->engine);
  Target target{engine.cast<std::shared_ptr<EngineHolder>>()};
  if (process_set != python->world_set.ptr()) {
    const py::object id = call(python->member_id, process_set);
    target.process_set = id.cast<std::uint32_t>();
  }
  return target;
}

// The name that all ranks have for a call: the caller's, or a number.
std::string name_of_call(PyObject* given, std::string_view verb, const Target& target) {
  const bool named = PyUnicode_CheckExact(given) && PyUnicode_GET_LENGTH(given) > 0;
  if (named) return text_of(given);
  require(given == Py_None);
  return text_of(call(python->next_name, py::str(verb), py::int_(target.process_set)).ptr());
}

// The tensors of one call, from the arguments to the result.
class Call {
 public:
  Call(PyObject* tensors, PyObject* form)
      : form_(form_of(form)), grouped_(PyList_CheckExact(tensors) || PyTuple_CheckExact(tensors)) {
    const py::tuple given = grouped_ ? py::tuple(result_of(PySequence_Tuple(tensors)))
                                     : py::make_tuple(py::handle(tensors));
    require(!given.empty() && modes_are_off());
    for (const py::handle tensor : given) {
      parts_.push_back(part_of(py::reinterpret_borrow<py::object>(tensor), form_.in_place));
    }
  }

  // Submits the tensors. Returns the result, or, where the form is not blocking, the core's handle
  // and a function that makes the result when the handle is done.
  static py::object run(std::unique_ptr<Call> self, const Target& target, EntryBuilder& entry);

  bool grouped() const { return grouped_; }
  std::string verb(Kind kind) const {
    return (grouped_ ? "grouped_" : "") + std::string(name_of(kind));
  }
  // Once, with the name of the call.
  EntryBuilder entry(Kind kind, const std::string& name, const Target& target) {
    EntryBuilder entry(kind, name, target.process_set);
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      Part& part = parts_[i];
      part.shape.name = grouped_ ? name + "." + std::to_string(i) : name;
      entry.tensor(part.shape, part.input, part.output, kHostMemory, nullptr);
    }
    return entry;
  }
  // After the operation has ended well: the result of the public function.
  py::object finish() const;

 private:
  py::tuple memory() const;  // what the core's handle keeps alive
  static PyObject* finish_later(PyObject* call, PyObject* handle);

  const Form form_;
  const bool grouped_;
  std::vector<Part> parts_;
};

py::tuple Call::memory() const {
  py::tuple kept(2 * parts_.size());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    kept[2 * i] = parts_[i].storage;
    kept[2 * i + 1] = parts_[i].result;
  }
  return kept;
}

[[noreturn]] void raise_moved(const std::string& name) {
  const py::str of(name);
  asleep_at_the_end([&] { (void)PyObject_CallOneArg(python->raise_moved.ptr(), of.ptr()); });
  throw py::error_already_set();
}

py::object Call::finish() const {
  py::tuple results(parts_.size());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    results[i] = parts_[i].result;
    if (!form_.in_place) continue;
    if (address_of(parts_[i].tensor.ptr()) != parts_[i].output) raise_moved(parts_[i].shape.name);
  }
  if (form_.in_place) python->increment_version(results);
  return grouped_ ? py::object(py::list(results)) : py::object(results[0]);
}

// Calls the work and returns what it returns: null with a Python error where it throws one, and
// None where the fast path does not take the call.
template <typename Work>
PyObject* guarded(Work&& work) {
  try {
    return work().release().ptr();
  } catch (const NotPlain&) {
    Py_RETURN_NONE;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* Call::finish_later(PyObject* call, PyObject* /*handle*/) {
  return guarded(
      [&] { return py::reinterpret_borrow<py::capsule>(call).get_pointer<Call>()->finish(); });
}

py::object Call::run(std::unique_ptr<Call> self, const Target& target, EntryBuilder& entry) {
  std::unique_ptr<HandleObject> handle =
      submit(target.holder, entry, self->memory(), self->form_.blocking);
  if (self->form_.blocking) {
    handle->wait(std::nullopt, std::nullopt);
    return self->finish();
  }
  static PyMethodDef finish = {"finish", &Call::finish_later, METH_O, nullptr};
  const py::capsule call(self.release(), [](void* call) { delete static_cast<Call*>(call); });
  py::object later = py::reinterpret_steal<py::object>(PyCFunction_New(&finish, call.ptr()));
  if (!later) throw py::error_already_set();
  return py::make_tuple(std::move(handle), later);
}

// The functions of the module, see hvdlite/torch/collectives/fast_path.py. Their arguments are
// those of the public functions, in one order, and the form.

PyObject* fast_allreduce(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  enum { kTensors, kAverage, kName, kOp, kPrescale, kPostscale, kProcessSet, kForm, kCount };
  return guarded([&] {
    require(is_on && count == kCount);
    const int op = op_of(arguments[kAverage], arguments[kOp]);
    const double prescale = scale_of(arguments[kPrescale]);
    const double postscale = scale_of(arguments[kPostscale]);
    auto call = std::make_unique<Call>(arguments[kTensors], arguments[kForm]);
    const Target target = target_of(arguments[kProcessSet]);
    const std::string name = name_of_call(arguments[kName], call->verb(Kind::kAllreduce), target);
    EntryBuilder entry = call->entry(Kind::kAllreduce, name, target);
    entry.reduce(op, prescale, postscale);
    return Call::run(std::move(call), target, entry);
  });
}

PyObject* fast_broadcast(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  enum { kTensor, kRoot, kName, kProcessSet, kForm, kCount };
  return guarded([&] {
    require(is_on && count == kCount && PyLong_CheckExact(arguments[kRoot]));
    const long root = number<long>(arguments[kRoot], &PyLong_AsLong);
    auto call = std::make_unique<Call>(arguments[kTensor], arguments[kForm]);
    require(!call->grouped());
    const Target target = target_of(arguments[kProcessSet]);
    const GroupPtr group = target.holder->engine().process_set(target.process_set);
    require(group != nullptr && root >= 0 && root < target.holder->engine().size() &&
            group->index_of(static_cast<int>(root)) >= 0);
    const std::string name = name_of_call(arguments[kName], call->verb(Kind::kBroadcast), target);
    EntryBuilder entry = call->entry(Kind::kBroadcast, name, target);
    entry.root(static_cast<int>(root));
    return Call::run(std::move(call), target, entry);
  });
}

PyObject* fast_barrier(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  enum { kProcessSet, kName, kCount };
  return guarded([&] {
    require(is_on && count == kCount);
    const Target target = target_of(arguments[kProcessSet]);
    EntryBuilder entry(Kind::kBarrier,
                       name_of_call(arguments[kName], name_of(Kind::kBarrier), target),
                       target.process_set);
    submit(target.holder, entry, py::none(), /*blocking=*/true)->wait(std::nullopt, std::nullopt);
    return py::object(py::bool_(true));
  });
}

// None where not all gradients are plain, see Gradients.
py::object read_gradients(py::list params, const std::vector<TensorArgument*>& tensors) {
  try {
    require(is_on && modes_are_off());
    return py::cast(Gradients::read(std::move(params), tensors));
  } catch (const NotPlain&) {
    return py::none();
  }
}

bool install(const py::object& exchange, py::object tensor_type, py::object dispatch_modes,
             py::object increment_version, py::object empty_like, py::object engine,
             py::object world_set, py::object member_id, py::object next_name,
             py::object raise_moved) {
  if (!install_plain_tensors(exchange, std::move(tensor_type), std::move(dispatch_modes))) {
    return false;
  }
  python = new Callbacks{std::move(increment_version), std::move(empty_like), std::move(engine),
                         std::move(world_set),         std::move(member_id),  std::move(next_name),
                         std::move(raise_moved)};
  return is_on = true;
}

// Switches a fast path that is installed on or off; returns whether it was on.
bool switch_to(bool on) { return std::exchange(is_on, on && python != nullptr); }

PyCFunction as_method(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

void register_fast_path(py::module_& module) {
  static PyMethodDef functions[] = {
      {"allreduce", as_method(&fast_allreduce), METH_FASTCALL, nullptr},
      {"broadcast", as_method(&fast_broadcast), METH_FASTCALL, nullptr},
      {"barrier", as_method(&fast_barrier), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  py::module_ fast_path = module.def_submodule("fast_path");
  if (PyModule_AddFunctions(fast_path.ptr(), functions) != 0) throw py::error_already_set();
  fast_path.def("install", &install, py::kw_only(), py::arg("exchange"), py::arg("tensor_type"),
                py::arg("dispatch_modes"), py::arg("increment_version"), py::arg("empty_like"),
                py::arg("engine"), py::arg("world_set"), py::arg("member_id"), py::arg("next_name"),
                py::arg("raise_moved"));
  fast_path.def("switch", &switch_to, py::arg("on"));
  py::class_<Gradients>(fast_path, "Gradients", py::is_final())
      .def_property_readonly("gradients", &Gradients::gradients)
      .def("first_changed", &Gradients::first_changed);
  fast_path.def("read_gradients", &read_gradients, py::arg("params"), py::arg("tensors"));
}

}  // namespace hvdlite
