#include "python/long_waits.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>
#include <utility>

namespace py = pybind11;

namespace hvdlite {
namespace {

// Modules whose functions begin threads that run no code of the user which could submit.
constexpr const char* kQuietModules[] = {
    "multiprocessing.queues",                       // feeds what a process puts into a queue
    "torch.utils.data._utils.pin_memory",           // pins what a DataLoader yields
    "torch._inductor.compile_worker.subproc_pool",  // reads what torch.compile's processes say
    "tqdm._monitor",                                // redraws progress bars
    "tensorboard.summary.writer.event_file_writer",
};
constexpr const char* kThreading = "threading";
constexpr const char* kPool = "concurrent.futures.thread";
constexpr const char* kOurs = "hvdlite.";
// Waits, in a thread of autograd's own, after all functions of a backward have run.
constexpr const char* kBackwardEnd = "hvdlite.torch.reducer";
// Its thread waits for operations, and then calls the user's functions.
constexpr const char* kWaiter = "hvdlite.torch.distributed.work";

std::string module_of(const py::object& frame) {
  const py::dict globals = frame.attr("f_globals");
  if (!globals.contains("__name__")) return "";
  const py::object name = globals["__name__"];
  return py::isinstance<py::str>(name) ? name.cast<std::string>() : "";
}

// The modules of a thread's functions, from the one that called all others.
std::vector<std::string> modules_of(py::object frame) {
  std::vector<std::string> modules;
  for (; !frame.is_none(); frame = frame.attr("f_back")) modules.push_back(module_of(frame));
  std::reverse(modules.begin(), modules.end());
  return modules;
}

// Whether a thread is inside of autograd's engine, or about to enter it.
bool is_in_backward(const std::vector<std::string>& modules) {
  return modules.back() == "torch.autograd.graph" || modules.back() == "torch.autograd";
}

// hvdlite itself, or the standard library.
bool is_ours_or_standard(const std::string& module) {
  if (module.starts_with(kOurs)) return true;
  PyObject* const standard = PySys_GetObject("stdlib_module_names");  // borrowed
  const py::str top(module.substr(0, module.find('.')));
  return standard != nullptr && PySet_Contains(standard, top.ptr()) == 1;
}

// Whether a thread submits nothing, because of the code that it runs.
bool is_quiet(const std::vector<std::string>& modules) {
  const auto first = std::find_if(modules.begin(), modules.end(),
                                  [](const auto& module) { return module != kThreading; });
  if (first == modules.begin() || first == modules.end()) return false;
  if (std::count(std::begin(kQuietModules), std::end(kQuietModules), *first) > 0) return true;
  if (*first == kPool) return first + 1 == modules.end();
  if (*first == kWaiter && modules.back() != kThreading) return false;
  return first->starts_with(kOurs) && std::all_of(first, modules.end(), is_ours_or_standard);
}

py::dict current_frames() {
  return py::reinterpret_borrow<py::object>(PySys_GetObject("_current_frames"))();
}

// The innermost place in a thread's frames that is neither in hvdlite nor in another library.
std::string place_of(py::object frame) {
  for (; !frame.is_none(); frame = frame.attr("f_back")) {
    const auto encoded =
        frame.attr("f_code").attr("co_filename").attr("encode")("utf-8", "replace");
    const auto file = encoded.cast<std::string>();
    const bool installed = file.find("-packages/") != std::string::npos || file.starts_with('<');
    if (installed || is_ours_or_standard(module_of(frame))) continue;
    return file + ":" + py::str(frame.attr("f_lineno")).cast<std::string>();
  }
  return "";
}

}  // namespace

LongWaits& LongWaits::all() {
  static auto* const instance = new LongWaits;
  return *instance;
}

void LongWaits::report(Engine& engine, std::vector<EntryPtr> waits,
                       std::vector<std::string> places) {
  engine.with_present(
      [&](Engine& present) { present.note_blocked(std::move(waits), std::move(places)); });
}

void LongWaits::goes_on(const ThreadWait& wait, std::chrono::nanoseconds slice) {
  const Patience limit = wait.engine.blocked_after();
  if (wait.returns || limit == kForever) return;
  const auto now = std::chrono::steady_clock::now();
  Since& since = waits_.try_emplace(&wait, Since{now - slice}).first->second;
  if (now - since.begun < limit) return;
  since.thread = PyThread_get_thread_ident();
  if (may_submit()) return report(wait.engine, {});
  report(wait.engine, waits_of_all(wait.engine), places_of_all());
}

void LongWaits::ended(const ThreadWait& wait) {
  const auto node = waits_.extract(&wait);
  const bool was_long = !node.empty() && node.mapped().thread != 0;
  if (was_long && !wait.entry->completion->done()) report(wait.engine, {});
}

std::vector<EntryPtr> LongWaits::waits_of_all(const Engine& engine) const {
  std::vector<EntryPtr> entries;
  for (const auto& [wait, since] : waits_) {
    if (since.thread == 0) continue;
    if (wait->entry->completion->done() || !engine.shares_entries_with(wait->engine)) return {};
    entries.push_back(wait->entry);
  }
  return entries;
}

std::vector<std::string> LongWaits::places_of_all() const {
  const py::dict frames = current_frames();
  std::vector<std::string> places;
  for (const auto& [wait, since] : waits_) {
    if (since.thread == 0) continue;
    const py::int_ thread(since.thread);
    places.push_back(frames.contains(thread) ? place_of(frames[thread]) : "");
  }
  return places;
}

bool LongWaits::may_submit() const {
  std::size_t in_backward = 0;
  std::size_t backward_ends = 0;
  for (const auto& [identifier, frame] : current_frames()) {
    const auto thread = identifier.cast<unsigned long>();
    const bool waits = std::any_of(waits_.begin(), waits_.end(),
                                   [&](const auto& one) { return one.second.thread == thread; });
    const auto modules = modules_of(py::reinterpret_borrow<py::object>(frame));
    if (waits) {
      backward_ends += modules.front() == kBackwardEnd ? 1 : 0;
    } else if (is_in_backward(modules)) {
      ++in_backward;
    } else if (!is_quiet(modules)) {
      return true;
    }
  }
  // The one thread that called backward() waits for the one that is at the backward's end.
  return in_backward > 1 || (in_backward == 1 && backward_ends != 1);
}

}  // namespace hvdlite
