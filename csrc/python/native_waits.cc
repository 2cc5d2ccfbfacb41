#include "python/native_waits.h"

#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "python/long_waits.h"

namespace py = pybind11;

namespace hvdlite {
namespace {

constexpr int kGraces = 3;  // for which all is quiet before the report

using State = ThreadState::Kind;

// The system's numbers of Python's threads, by identifier. This runs Python code.
std::map<unsigned long, int> python_threads() {
  std::map<unsigned long, int> numbers;
  const auto threading = py::module_::import("threading");
  for (const py::handle thread : threading.attr("enumerate")()) {
    const py::object number = thread.attr("native_id");
    const py::object identifier = thread.attr("ident");
    if (number.is_none() || identifier.is_none()) continue;
    numbers[identifier.cast<unsigned long>()] = number.cast<int>();
  }
  // After a fork Python 3.11 has the number of the parent's.
  numbers[threading.attr("main_thread")().attr("ident").cast<unsigned long>()] = ::getpid();
  return numbers;
}

// The identifiers of the threads that have Python frames.
std::set<unsigned long> threads_with_frames() {
  std::set<unsigned long> threads;
  const auto frames = py::reinterpret_borrow<py::object>(PySys_GetObject("_current_frames"));
  for (const auto& row : py::dict(frames())) threads.insert(row.first.cast<unsigned long>());
  return threads;
}

}  // namespace

std::optional<double> NativeWaits::look() {
  Engine& engine = holder_->engine();
  const LongWaits& all = LongWaits::all();
  const auto half = LongWaits::patience(engine);
  if (!half) return std::nullopt;
  const std::chrono::nanoseconds quiet = 2 * kGraces * *half;
  const auto seconds = [](std::chrono::nanoseconds time) {
    return std::chrono::duration<double>(time).count();
  };
  const auto threads = python_threads();
  // From here on no Python code runs.
  std::vector<EntryPtr> waits = all.in_flight();
  const std::size_t native = waits.size();
  const std::vector<EntryPtr> of_python = all.waits_of_all(engine);
  waits.insert(waits.end(), of_python.begin(), of_python.end());
  const bool mixed = all.any() && of_python.empty();
  std::optional<Sleepers> now;
  // In training it seldom is the same operation twice, and the look at all threads costs something.
  if (!waits.empty() && !mixed && waits == waits_) now = sleepers(threads);
  if (!now || now != sleepers_) since_ = Clock::now();
  sleepers_ = std::move(now);
  waits_ = waits;
  report(sleepers_ && Clock::now() - since_ >= quiet ? std::move(waits) : std::vector<EntryPtr>());
  return seconds(native > 0 || all.any() ? *half : quiet / 2);
}

void NativeWaits::report(std::vector<EntryPtr> waits) {
  if (waits.empty() && !reported_) return;
  reported_ = !waits.empty();
  LongWaits::report(holder_->engine(), std::move(waits));
}

std::optional<NativeWaits::Sleepers> NativeWaits::sleepers(
    const std::map<unsigned long, int>& python_threads) {
  const std::vector<unsigned long> may_submit = LongWaits::all().threads_that_may_submit();
  std::set<int> counting;  // threads with frames that sleep until they are woken, or not at all
  for (const unsigned long thread : may_submit) {
    const auto found = python_threads.find(thread);
    if (found == python_threads.end()) return std::nullopt;
    counting.insert(found->second);
  }
  std::set<int> exempt;
  for (const unsigned long thread : threads_with_frames()) {
    const auto found = python_threads.find(thread);
    if (found != python_threads.end()) exempt.insert(found->second);
  }
  const auto states = thread_states();
  if (!states) return std::nullopt;
  Sleepers sleepers;
  for (const ThreadState& state : *states) {
    const bool counts = counting.erase(state.id) > 0;
    if (!counts && (exempt.contains(state.id) || state.name.starts_with("hvdlite-"))) continue;
    if (state.kind == State::kOther || (counts && state.kind == State::kForATime)) {
      return std::nullopt;
    }
    sleepers[state.id] = state.kind == State::kUntilWoken ? state.switches : 0;
  }
  if (!counting.empty()) return std::nullopt;  // a number is another thread's by now
  return sleepers;
}

NativeWaits::NativeWaits(std::shared_ptr<EngineHolder> holder) : holder_(std::move(holder)) {
  LongWaits::all().note_native_submitters();
}

void register_deadlock_proof(py::module_& module) {
  wait_observer() = &LongWaits::all();
  py::class_<NativeWaits>(module, "NativeWaits", py::is_final())
      .def(py::init<std::shared_ptr<EngineHolder>>(), py::arg("engine"))
      .def("look", &NativeWaits::look);
}

}  // namespace hvdlite
