#include "python/pending_operations.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/pending_operations.h"
#include "python/handle.h"
#include "python/unlocked.h"

namespace py = pybind11;

namespace hvdlite {
namespace {

py::dict report(const PendingOperations& self, const std::vector<int>& gone) {
  const PendingOperations::Report report = self.report(gone);
  py::dict row;
  row["commits"] = report.commits;
  row["stuck"] = report.stuck.empty() ? py::object(py::none()) : py::str(report.stuck);
  row["suspect"] = report.cause.failed_rank() < 0 ? py::object(py::none())
                                                  : py::int_(report.cause.failed_rank());
  row["reason"] = report.cause.message();
  return row;
}

void deliver(PendingOperations& self, const CommitCounts& commit_point) {
  const Unlocked unlocked;
  self.deliver(commit_point);
}

void resume(PendingOperations& self, const EngineHolder& next, const std::vector<int>& rank_of) {
  Engine& engine = next.engine();
  const Unlocked unlocked;
  self.resume(engine, rank_of);
}

void fail(PendingOperations& self, const std::string& reason) {
  const Unlocked unlocked;
  self.fail(Status(StatusCode::kRankFailed, reason));
}

}  // namespace

void register_pending_operations(py::module_& module) {
  py::class_<PendingOperations, std::shared_ptr<PendingOperations>>(module, "PendingOperations",
                                                                    py::is_final())
      .def(py::init<>())
      .def_property_readonly("lost_fd", &PendingOperations::lost_fd)
      .def("report", &report, py::arg("gone"))
      .def("deliver", &deliver, py::arg("commit_point"))
      .def("process_sets", &PendingOperations::process_sets, py::arg("rank_of"))
      .def("resume", &resume, py::arg("engine"), py::arg("rank_of"))
      .def("fail", &fail, py::arg("reason"));
}

}  // namespace hvdlite
