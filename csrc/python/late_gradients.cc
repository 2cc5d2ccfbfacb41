// Late gradients, as Python sees them: those of an all-reduce, and who was late.
#include <memory>
#include <string>
#include <utility>

#include "python/bindings.h"
#include "python/handle.h"

namespace py = pybind11;

namespace hvdlite {
namespace {

std::unique_ptr<LateCall> make_terms(std::string key, std::uint64_t step, std::uint32_t quorum,
                                     std::int64_t grace_us, std::uint32_t bound, bool fold,
                                     bool skip) {
  return std::make_unique<LateCall>(
      LateCall{{std::move(key), step, quorum, grace_us, bound, fold}, skip});
}

py::list attendance(const EngineHolder& engine, const std::string& key) {
  py::list rows;
  for (const Attendance::Row& row : engine.engine().attendance().rows(key)) {
    rows.append(py::make_tuple(row.late, row.skipped, row.folded, row.oldest));
  }
  return rows;
}

int waiting_results(const EngineHolder& engine, const std::string& key) {
  return engine.engine().attendance().waiting(key);
}

}  // namespace

void register_late_gradients(py::module_& module) {
  py::class_<LateCall>(module, "LateTerms", py::is_final())
      .def(py::init(&make_terms), py::arg("key"), py::arg("step"), py::arg("quorum"),
           py::arg("grace_us"), py::arg("bound"), py::arg("fold"), py::arg("skip"));
  module.def("attendance", &attendance, py::arg("engine"), py::arg("key"));
  module.def("waiting_results", &waiting_results, py::arg("engine"), py::arg("key"));
}

}  // namespace hvdlite
