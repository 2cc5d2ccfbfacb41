#include "python/handle.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <string>
#include <thread>

#include "python/bindings.h"
#include "python/long_waits.h"

namespace py = pybind11;

namespace hvdlite {
namespace {

// The time between two looks for Ctrl-C while a thread waits with the GIL released.
constexpr auto kSignalSlice = std::chrono::milliseconds(100);
constexpr double kLongestSeconds = 1e9;
// The time between two looks at a device for whose work a thread waits.
constexpr auto kDeviceInterval = std::chrono::microseconds(50);

// A Python buffer that owns bytes that were received.
struct OutputBuffer {
  Completion::Output output;
};

}  // namespace

// The way from the engine's thread, which never takes the GIL, to release_orphans(): a pending
// call, which Python's main thread runs between two steps of the program.
struct ReleaseCall {
  std::weak_ptr<EngineHolder> holder;
  std::atomic<bool> due{false};
};

namespace {

int release_now(void* argument) {
  const std::unique_ptr<std::shared_ptr<ReleaseCall>> call(
      static_cast<std::shared_ptr<ReleaseCall>*>(argument));
  (*call)->due.store(false);
  if (const auto holder = (*call)->holder.lock()) holder->release_orphans();
  return 0;
}

// Any thread. If Python's list of pending calls is full, the next submission releases the orphans.
void release_soon(const std::shared_ptr<ReleaseCall>& call) {
  if (Py_IsInitialized() == 0 || call->due.exchange(true)) return;
  auto argument = std::make_unique<std::shared_ptr<ReleaseCall>>(call);
  if (Py_AddPendingCall(&release_now, argument.get()) == 0) {
    (void)argument.release();  // release_now() owns it
  } else {
    call->due.store(false);
  }
}

}  // namespace

void EngineHolder::adopt(EntryPtr entry, py::object keep) {
  if (release_call_ == nullptr) {
    release_call_ = std::make_shared<ReleaseCall>();
    release_call_->holder = weak_from_this();
  }
  Completion& completion = *entry->completion;
  orphans_.emplace_back(std::move(entry), std::move(keep));
  if (!completion.then_unless_done([call = release_call_] { release_soon(call); })) {
    release_orphans();
  }
}

EngineHolder::~EngineHolder() {
  if (forked()) {
    // The engine's threads live in the parent only; joining them here would hang.
    (void)engine_.release();
    for (auto& orphan : orphans_) (void)orphan.second.release();
    return;
  }
  {
    const Unlocked unlocked;
    engine_.reset();
  }
  for (auto& orphan : orphans_) {
    if (!orphan.first->completion->done()) unowned().push_back(std::move(orphan));
  }
}

// Never destroyed: Python may end before it.
EngineHolder::Orphans& EngineHolder::unowned() {
  static auto* const orphans = new Orphans;
  return *orphans;
}

void EngineHolder::release_orphans() {
  for (auto& orphan : std::exchange(unowned(), {})) orphans_.push_back(std::move(orphan));
  // Released last, because the code that a release runs may drop handles too.
  Orphans released;
  const auto ended = std::stable_partition(
      orphans_.begin(), orphans_.end(),
      [](const auto& orphan) { return !orphan.first->completion->released(); });
  std::move(ended, orphans_.end(), std::back_inserter(released));
  orphans_.erase(ended, orphans_.end());
}

HandleObject::~HandleObject() {
  // The operation and its memory are the parent's, and a thread that is only there may hold the
  // completion's lock.
  if (keep_.is_none() || forked() || released()) return;
  holder_->adopt(entry_, std::move(keep_));
}

void HandleObject::raise_timeout() const {
  PyErr_SetString(PyExc_TimeoutError, (describe(entry_->request) + " is still under way").c_str());
  throw py::error_already_set();
}

void HandleObject::wait(std::optional<double> timeout, std::optional<std::uintptr_t> stream,
                        bool fatal) {
  // A timeout of 0 looks once, as everywhere in Python; one that no clock can count means never, as
  // None does.
  const bool ends = timeout && *timeout < kLongestSeconds;
  const Deadline deadline = ends ? Deadline::after_seconds(*timeout) : Deadline::never();
  if (!done()) wait_until_done(deadline, fatal);
  Engine::note_wait();
  if (entry_->completion->status().ok() && entry_->completion->on_device != nullptr) {
    wait_for_device(stream, deadline);
  }
  if (entry_->completion->status().ok() || released()) keep_ = py::none();
  // Ctrl-C goes to all ranks. A rank that it ended first may be the error here; but the user's own
  // Ctrl-C is what this process must raise.
  if (!entry_->completion->status().ok() && PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
  raise_if_error(entry_->completion->status());
}

void HandleObject::wait_until_done(const Deadline& deadline, bool fatal) {
  Engine& engine = holder_->engine();
  ThreadWait wait(engine, entry_, /*returns=*/!deadline.is_never() && !fatal);
  while (!done()) {
    if (deadline.passed()) raise_timeout();
    {
      const Unlocked unlocked;
      (void)engine.wait(*entry_, blocking_, deadline.earlier(Deadline::after(kSignalSlice)));
    }
    if (!done() && PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!done()) wait.goes_on(kSignalSlice);
  }
}

// Makes the stream wait for the device, or this thread if there is no stream. Once the world has
// ended, the device may have stopped half-way.
void HandleObject::wait_for_device(std::optional<std::uintptr_t> stream, const Deadline& deadline) {
  const CudaEvent& end = *entry_->completion->on_device;
  if (stream) {
    raise_if_error(end.device().wait(stream_of(*stream), end));
  }
  while (!stream && !end.reached()) {
    if (deadline.passed()) raise_timeout();
    {
      const Unlocked unlocked;
      std::this_thread::sleep_for(kDeviceInterval);
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  if (holder_->engine().elastic()) return;  // a commit has waited for the device already
  const Status world = holder_->engine().status();
  if (!world.ok() && world.code() != StatusCode::kShutdown) raise_status(world);
}

Completion::Output& HandleObject::output(std::size_t index) {
  if (!done()) raise_status(Status(StatusCode::kInvalidArgument, "wait() for the handle first"));
  std::vector<Completion::Output>& outputs = entry_->completion->outputs;
  if (index >= outputs.size()) {
    raise_status(Status(StatusCode::kInvalidArgument, "no output " + std::to_string(index)));
  }
  return outputs[index];
}

py::object HandleObject::take_output(std::size_t index) {
  Completion::Output& received = output(index);
  if (received.data == nullptr) {
    raise_status(Status(StatusCode::kInvalidArgument,
                        "this output was taken, is on a GPU, or lies in the memory that its tensor "
                        "gave for it"));
  }
  auto buffer = std::make_unique<OutputBuffer>();
  buffer->output = std::move(received);
  return py::memoryview(py::cast(std::move(buffer)));
}

// Copies on the stream that wait() was given, because that stream waits for the result already.
void HandleObject::copy_output(std::size_t index, std::uintptr_t target, std::uintptr_t stream) {
  if (!output(index).device.valid()) {
    raise_status(Status(StatusCode::kInvalidArgument, "this output is not on a GPU, or was taken"));
  }
  raise_if_error(entry_->completion->copy_output(
      index, reinterpret_cast<void*>(target), stream_of(stream)));  // NOLINT: a number of Python's
}

std::uintptr_t HandleObject::stream() const {
  if (!entry_->gpu) return 0;
  return reinterpret_cast<std::uintptr_t>(  // NOLINT: a handle for Python
      entry_->gpu->ready->device().stream());
}

HandlePtr submit(const std::shared_ptr<EngineHolder>& holder, EntryBuilder& call, py::object keep,
                 bool blocking) {
  EntryPtr entry = value_of(call.build());
  holder->release_orphans();
  raise_if_error(holder->engine().enqueue(entry, blocking));
  return std::make_unique<HandleObject>(holder, std::move(entry), std::move(keep), blocking);
}

void register_handle(py::module_& module) {
  py::class_<OutputBuffer>(module, "_Output", py::buffer_protocol())
      .def_buffer([](OutputBuffer& buffer) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(buffer.output.data.get()),
                               static_cast<py::ssize_t>(buffer.output.bytes));
      });
  py::class_<HandleObject>(module, "Handle", py::is_final())
      .def("done", &HandleObject::done)
      .def("wait", &HandleObject::wait, py::arg("timeout") = py::none(),
           py::arg("stream") = py::none(), py::arg("fatal") = false)
      .def_property_readonly("first_dimensions", &HandleObject::first_dimensions)
      .def_property_readonly("set_id", &HandleObject::set_id)
      .def_property_readonly("last_joined", &HandleObject::last_joined)
      .def_property_readonly("members", &HandleObject::members)
      .def_property_readonly("epoch", &HandleObject::epoch)
      .def("take_output", &HandleObject::take_output, py::arg("index") = 0)
      .def("copy_output", &HandleObject::copy_output, py::arg("index"), py::arg("target"),
           py::arg("stream"))
      .def("released", &HandleObject::released)
      .def_property_readonly("stream", &HandleObject::stream);
}

}  // namespace hvdlite
