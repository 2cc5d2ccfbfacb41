// The name of an operation or a tensor, as Python gives it. Include it wherever a bound function
// takes a `Name`, so that pybind11 finds the conversion. Needs the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "python/bindings.h"

namespace hvdlite {

// UTF-8, since messages, the wire and the timeline hold names as UTF-8.
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
