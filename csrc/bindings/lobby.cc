#include "bindings/lobby.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/handle.h"
#include "engine/lobby.h"

namespace py = pybind11;

namespace hvdlite {
namespace {

py::dict report(const Lobby& self, const std::vector<int>& gone) {
  const Lobby::Report report = self.report(gone);
  py::dict row;
  row["commits"] = report.commits;
  row["stuck"] = report.stuck.empty() ? py::object(py::none()) : py::str(report.stuck);
  row["accused"] = report.cause.failed_rank() < 0 ? py::object(py::none())
                                                  : py::int_(report.cause.failed_rank());
  row["reason"] = report.cause.message();
  return row;
}

void deliver(Lobby& self, const CommitCounts& cut) {
  const Unlocked unlocked;
  self.deliver(cut);
}

void resume(Lobby& self, const EngineHolder& next, const std::vector<int>& rank_of) {
  Engine& engine = next.engine();
  const Unlocked unlocked;
  self.resume(engine, rank_of);
}

void fail(Lobby& self, const std::string& reason) {
  const Unlocked unlocked;
  self.fail(Status(StatusCode::kRankFailed, reason));
}

}  // namespace

void register_lobby(py::module_& module) {
  py::class_<Lobby, std::shared_ptr<Lobby>>(module, "Lobby", py::is_final())
      .def(py::init<>())
      .def_property_readonly("lost_fd", &Lobby::lost_fd)
      .def("report", &report, py::arg("gone"))
      .def("deliver", &deliver, py::arg("cut"))
      .def("process_sets", &Lobby::process_sets, py::arg("rank_of"))
      .def("resume", &resume, py::arg("engine"), py::arg("rank_of"))
      .def("fail", &fail, py::arg("reason"));
}

}  // namespace hvdlite
