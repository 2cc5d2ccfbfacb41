#include <pybind11/stl.h>

#include <tuple>

#include "gpu/gpu_plane.h"
#include "python/bindings.h"
#include "python/unlocked.h"

namespace py = pybind11;

namespace hvdlite {
namespace {

using Row = std::tuple<std::string, bool, std::string>;

std::vector<Row> gpu_report(const std::vector<std::string>& nccl_folders) {
  const Result<Config> config = Config::from_environment();
  raise_if_error(config.status());
  const Unlocked unlocked;
  const GpuReport report = examine_gpus(config.value(), nccl_folders);
  return {{"CUDA driver", report.driver.ok, report.driver.reason},
          {"NCCL", report.nccl.ok, report.nccl.reason}};
}

}  // namespace

void register_gpu(py::module_& module) {
  module.def("gpu_report", &gpu_report, py::arg("nccl_folders"));
}

}  // namespace hvdlite
