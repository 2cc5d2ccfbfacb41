#include "python/bindings.h"
#include "python/unlocked.h"

namespace py = pybind11;

namespace hvdlite {
namespace {

const char* class_of(StatusCode code) {
  switch (code) {
    case StatusCode::kInvalidArgument:
      return "ArgumentError";
    case StatusCode::kMismatch:
      return "MismatchError";
    case StatusCode::kDeadlock:
      return "DeadlockError";
    case StatusCode::kDuplicateName:
      return "DuplicateNameError";
    case StatusCode::kOutOfMemory:
      return "OutOfMemoryError";
    case StatusCode::kRankFailed:
      return "RankFailedError";
    case StatusCode::kTimeout:
      return "CollectiveTimeoutError";
    case StatusCode::kStalled:
      return "StalledError";
    case StatusCode::kShutdown:
      return "ShutdownError";
    case StatusCode::kForked:
      return "ForkedError";
    case StatusCode::kOk:
    case StatusCode::kInternal:
      break;
  }
  return "CollectiveError";
}

}  // namespace

void raise_status(const Status& status) {
  // This runs Python code. Other threads may get the GIL meanwhile, and the interpreter may end.
  asleep_at_the_end([&status] {
    const py::object type = py::module_::import("hvdlite.errors").attr(class_of(status.code()));
    const py::object error = type(status.message());
    if (status.failed_rank() >= 0) error.attr("failed_rank") = status.failed_rank();
    PyErr_SetObject(type.ptr(), error.ptr());
  });
  throw py::error_already_set();
}

}  // namespace hvdlite

PYBIND11_MODULE(_core, module) {
  module.attr("__version__") = HVDLITE_VERSION;
  hvdlite::register_tables(module);
  hvdlite::register_gpu(module);
  hvdlite::register_engine(module);
  hvdlite::register_fast_path(module);
  hvdlite::register_late_gradients(module);
}
