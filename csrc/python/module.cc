#include <pybind11/stl.h>

#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/cpu.h"
#include "base/dtype.h"
#include "gpu/gpu_plane.h"
#include "kernels/sum_tree.h"
#include "python/bindings.h"
#include "transport/segment.h"

namespace py = pybind11;
using namespace py::literals;

namespace hvdlite {
namespace {

// The class of hvdlite.errors of each StatusCode.
constexpr const char* kClasses[] = {
    "CollectiveError",  "ArgumentError",   "MismatchError",          "DuplicateNameError",
    "OutOfMemoryError", "RankFailedError", "CollectiveTimeoutError", "StalledError",
    "ShutdownError",    "ForkedError",     "CollectiveError",        "DeadlockError"};
static_assert(std::size(kClasses) == static_cast<std::size_t>(kLastStatusCode) + 1);

}  // namespace

void raise_status(const Status& status) {
  // This runs Python code. Other threads may get the GIL meanwhile, and the interpreter may end.
  asleep_at_the_end([&status] {
    const char* name = kClasses[static_cast<std::size_t>(status.code())];
    const py::object type = py::module_::import("hvdlite.errors").attr(name);
    const py::object error = type(status.message());
    if (status.failed_rank() >= 0) error.attr("failed_rank") = status.failed_rank();
    PyErr_SetObject(type.ptr(), error.ptr());
  });
  throw py::error_already_set();
}

namespace {

py::dict dtype_table() {
  py::dict table;
  for (int i = 0; i < kDataTypeCount; ++i) {
    table[py::str(std::string(name_of(static_cast<DataType>(i))))] = i;
  }
  return table;
}

py::set reducible_names() {
  py::set names;
  for (int i = 0; i < kDataTypeCount; ++i) {
    const auto dtype = static_cast<DataType>(i);
    if (computes(dtype)) names.add(py::str(std::string(name_of(dtype))));
  }
  return names;
}

py::dict op_table() {
  py::dict table;
  for (int i = 0; i <= static_cast<int>(ReduceOp::kProduct); ++i) {
    if (is_valid_op(i)) table[py::str(std::string(name_of(static_cast<ReduceOp>(i))))] = i;
  }
  return table;
}

py::list knob_rows() {
  py::list rows;
  for (const Knob& knob : knobs()) {
    const std::string range =
        knob.range ? std::to_string(knob.range->least) + " to " + std::to_string(knob.range->most)
                   : "";
    rows.append(py::dict("name"_a = knob.name, "environment"_a = knob.environment,
                         "horovod"_a = knob.horovod, "type"_a = knob.type,
                         "default"_a = knob.fallback, "unit"_a = knob.unit, "help"_a = knob.help,
                         "range"_a = range));
  }
  return rows;
}

std::map<std::string, std::string> agreed_knobs() {
  const Config config = value_of(Config::from_environment());
  const auto rows = config.agreed();
  return {rows.begin(), rows.end()};
}

py::dict knob_values() {
  const Config& config = value_of(Config::from_environment());
  py::dict values;
#define HVDLITE_VALUE(type, field, fallback, range, unit, horovod, help)                           \
  values[#field] = config.field;
  HVDLITE_KNOBS(HVDLITE_VALUE)
#undef HVDLITE_VALUE
  return values;
}

int create_segment(int local_size) {
  if (local_size < 1)
    raise_status(Status(StatusCode::kInvalidArgument, "local_size is at least 1"));
  const Config config = value_of(Config::from_environment());
  return value_of(Segment::create(SegmentLayout::make(local_size, config))).release();
}

std::vector<std::pair<int, int>> blocks_of_virtual_ranks(const std::vector<int>& hosts,
                                                         int virtual_size) {
  const std::vector<VirtualBlock> blocks = value_of(virtual_blocks(hosts, virtual_size));
  std::vector<std::pair<int, int>> pairs;
  for (const VirtualBlock& block : blocks) pairs.emplace_back(block.first, block.size);
  return pairs;
}

using LibraryRow = std::tuple<std::string, bool, std::string>;

std::vector<LibraryRow> gpu_report(const std::vector<std::string>& nccl_folders) {
  const Config config = value_of(Config::from_environment());
  const Unlocked unlocked;
  std::vector<LibraryRow> rows;
  for (const auto& [library, ok, reason] : examine_gpus(config, nccl_folders)) {
    rows.emplace_back(library, ok, reason);
  }
  return rows;
}

}  // namespace

// dtypes, ops, knobs, what the machine has.
void register_tables(py::module_& module) {
  module.attr("DTYPES") = dtype_table();
  module.attr("REDUCIBLE") = py::frozenset(reducible_names());
  module.attr("REDUCE_OPS") = op_table();
  module.def("knobs", &knob_rows);
  module.def("knob_values", &knob_values);
  module.def("agreed_knobs", &agreed_knobs);
  module.def("available_cores", &available_cores);
  module.def("create_segment", &create_segment, py::arg("local_size"));
  module.def("virtual_blocks", &blocks_of_virtual_ranks, py::arg("hosts"), py::arg("virtual_size"));
  module.def("gpu_report", &gpu_report, py::arg("nccl_folders"));
}

}  // namespace hvdlite

PYBIND11_MODULE(_core, module) {
  module.attr("__version__") = HVDLITE_VERSION;
  hvdlite::register_tables(module);
  hvdlite::register_engine(module);
  hvdlite::register_fast_path(module);
}
