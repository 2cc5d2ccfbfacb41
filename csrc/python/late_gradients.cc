// Late gradients, as Python sees them: the terms of an all-reduce, and who was late.
#include <memory>
#include <string>
#include <utility>

#include "engine/late_results.h"
#include "python/bindings.h"
#include "python/handle.h"
#include "wire/late_terms.h"

namespace py = pybind11;

namespace hvdlite {
namespace {

class LateCall : public CallTerms {
 public:
  LateCall(LateTerms terms, bool skips) : terms_(std::move(terms)), skips_(skips) {}
  void add_to(EntryBuilder& call) const override {
    auto attachment = std::make_unique<LateEntry>();
    attachment->skips = skips_;
    if (skips_) call.weigh(0);
    call.weighted().terms(std::make_shared<LateTerms>(terms_), std::move(attachment));
  }

 private:
  const LateTerms terms_;
  const bool skips_;
};

std::unique_ptr<LateCall> make_terms(std::string key, std::uint64_t step, std::uint32_t quorum,
                                     std::int64_t grace_us, std::uint32_t bound, bool fold,
                                     bool skip) {
  LateTerms terms(std::move(key), step, quorum, grace_us, bound, fold);
  return std::make_unique<LateCall>(std::move(terms), skip);
}

const Attendance& attendance_of(const EngineHolder& engine) {
  return engine.engine().find<LateResults>()->attendance();
}

py::list attendance(const EngineHolder& engine, const std::string& key) {
  py::list rows;
  for (const Attendance::Row& row : attendance_of(engine).rows(key)) {
    rows.append(py::make_tuple(row.late, row.skipped, row.folded, row.oldest));
  }
  return rows;
}

int waiting_results(const EngineHolder& engine, const std::string& key) {
  return attendance_of(engine).waiting(key);
}

}  // namespace

void register_late_gradients(py::module_& module) {
  py::class_<LateCall, CallTerms>(module, "LateTerms", py::is_final())
      .def(py::init(&make_terms), py::arg("key"), py::arg("step"), py::arg("quorum"),
           py::arg("grace_us"), py::arg("bound"), py::arg("fold"), py::arg("skip"));
  module.def("attendance", &attendance, py::arg("engine"), py::arg("key"));
  module.def("waiting_results", &waiting_results, py::arg("engine"), py::arg("key"));
}

}  // namespace hvdlite
