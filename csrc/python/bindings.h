// What the files of this folder share: the functions that add the parts of the Python module
// `_core`, errors, the GIL and names. All of them need the GIL.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "base/status.h"

namespace hvdlite {

void register_engine(pybind11::module_& module);     // all classes but the fast path's
void register_fast_path(pybind11::module_& module);  // the fast path of torch's collectives

// Raises the class of hvdlite.errors that belongs to the status's code, with `failed_rank` set.
[[noreturn]] void raise_status(const Status& status);
inline void raise_if_error(const Status& status) {
  if (!status.ok()) raise_status(status);
}
template <typename T>
T value_of(Result<T> result) {
  raise_if_error(result.status());
  return std::move(result.value());
}

// Never returns. This costs nothing: the process is about to end.
[[noreturn]] inline void sleep_forever() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

// Runs work that asks for the GIL. CPython up to 3.13 ends a daemon thread that asks for the GIL
// once the interpreter has begun to end, by pthread_exit. That unwinds the stack: through
// destructors of Python objects, which need the GIL, and through noexcept functions, which abort
// the process. Such a thread stays in here instead, as it does in later Pythons.
template <typename Work>
void asleep_at_the_end(Work&& work) {
  try {
    work();
  } catch (abi::__forced_unwind&) {
    sleep_forever();
  }
}

// Releases the GIL as long as this object lives; the thread holds the GIL before and after.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    asleep_at_the_end([this] { PyEval_RestoreThread(state_); });
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// The name of an operation or a tensor, as Python gives it: UTF-8, since messages, the wire and
// the timeline hold names as UTF-8.
struct Name {
  std::string text;
};

// Raises ArgumentError for a str that has no UTF-8, which is one with a surrogate that stands
// alone, and TypeError for other objects.
[[noreturn]] inline void refuse_name(pybind11::handle object) {
  if (!PyUnicode_Check(object.ptr())) {
    throw pybind11::type_error(std::string("a name is a str, and not of type ") +
                               Py_TYPE(object.ptr())->tp_name);
  }
  raise_status(Status(StatusCode::kInvalidArgument,
                      "the name " + pybind11::repr(object).cast<std::string>() +
                          " has a character that UTF-8 cannot hold (a lone surrogate); give the "
                          "operation another name"));
}

}  // namespace hvdlite

template <>
struct pybind11::detail::type_caster<hvdlite::Name> {
  PYBIND11_TYPE_CASTER(hvdlite::Name, const_name("str"));

  bool load(handle object, bool convert) {
    make_caster<std::string> text;
    if (!text.load(object, convert)) hvdlite::refuse_name(object);
    value.text = cast_op<std::string&&>(std::move(text));
    return true;
  }
};
