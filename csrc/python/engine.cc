// The engine as Python holds it: `_core.Engine`, and what its methods take and return.
#include "engine/engine.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "engine/entry.h"
#include "engine/pending_operations.h"
#include "gpu/device_workspace.h"
#include "host/host_backend.h"
#include "python/bindings.h"
#include "python/handle.h"
#include "transport/fabric.h"
#include "transport/segment.h"

namespace py = pybind11;
using namespace py::literals;

namespace hvdlite {
namespace {

// Gradient memory as Python holds it: an area on a GPU (gpu/device_workspace.h), or a part of what
// the ranks of a host share (transport/segment.h). Frameworks make tensors of it without a copy, by
// __cuda_array_interface__ or the buffer protocol, and hold this object as long as those tensors
// live. Thread: any that holds the GIL; the destructor of the first releases the GIL while it waits
// for the device.
class GradientMemoryObject {
 public:
  explicit GradientMemoryObject(GradientMemory::Holder memory) : memory_(std::move(memory)) {}
  ~GradientMemoryObject() {
    // The memory belongs to the parent, and so does the thread that frees it.
    if (forked()) {
      new GradientMemory::Holder(std::move(memory_));  // NOLINT: never deleted
      return;
    }
    const Unlocked unlocked;
    memory_.reset();
  }
  GradientMemoryObject(const GradientMemoryObject&) = delete;
  GradientMemoryObject& operator=(const GradientMemoryObject&) = delete;

  // The memory as bytes, in version 3 of the interface. It names no stream, so the framework does
  // not wait for one.
  py::dict cuda_array_interface() const {
    return py::dict("shape"_a = py::make_tuple(memory_->bytes), "typestr"_a = "|u1",
                    "data"_a = py::make_tuple(memory_->address, /*read-only=*/false),
                    "strides"_a = py::none(), "version"_a = 3);
  }

 private:
  GradientMemory::Holder memory_;
};

class SharedGradientMemoryObject {
 public:
  explicit SharedGradientMemoryObject(GradientArea::Part part) : part_(std::move(part)) {}
  ~SharedGradientMemoryObject() {
    // The parent's pages are the same ones, and it still uses them.
    if (forked()) new GradientArea::Part(std::move(part_));  // NOLINT: never deleted
  }
  SharedGradientMemoryObject(const SharedGradientMemoryObject&) = delete;
  SharedGradientMemoryObject& operator=(const SharedGradientMemoryObject&) = delete;

  py::buffer_info bytes() const {
    return {reinterpret_cast<std::uint8_t*>(part_->data()),
            static_cast<py::ssize_t>(part_->size())};
  }

 private:
  GradientArea::Part part_;
};

void register_gradient_memory(py::module_& module) {
  py::class_<GradientMemoryObject>(module, "GradientMemory", py::is_final())
      .def_property_readonly("__cuda_array_interface__",
                             &GradientMemoryObject::cuda_array_interface);
  py::class_<SharedGradientMemoryObject>(module, "SharedGradientMemory", py::is_final(),
                                         py::buffer_protocol())
      .def_buffer(&SharedGradientMemoryObject::bytes);
}

// The pending operations as Python's membership thread holds them.

py::dict report(const PendingOperations& self, const std::vector<int>& gone) {
  const PendingOperations::Report report = self.report(gone);
  const int suspect = report.cause.failed_rank();
  return py::dict("commits"_a = report.commits,
                  "stuck"_a = report.stuck.empty() ? py::object(py::none()) : py::str(report.stuck),
                  "suspect"_a = suspect < 0 ? py::object(py::none()) : py::int_(suspect),
                  "reason"_a = report.cause.message());
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

// Late gradients, as Python sees them: those of an all-reduce, and who was late.

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

void register_late_gradients(py::module_& module) {
  py::class_<LateCall>(module, "LateCall", py::is_final())
      .def(py::init(&make_terms), py::arg("key"), py::arg("step"), py::arg("quorum"),
           py::arg("grace_us"), py::arg("bound"), py::arg("fold"), py::arg("skip"));
  module.def("attendance", &attendance, py::arg("engine"), py::arg("key"));
  module.def("waiting_results", &waiting_results, py::arg("engine"), py::arg("key"));
}

using HolderPtr = std::shared_ptr<EngineHolder>;

using Tensors = std::vector<const TensorArgument*>;

std::unique_ptr<TensorArgument> make_tensor(Name name, int dtype, std::vector<std::int64_t> shape,
                                            std::uintptr_t input, std::uintptr_t output, int gpu,
                                            std::optional<int> wire, std::uint64_t capacity) {
  auto tensor = std::make_unique<TensorArgument>();
  tensor->shape =
      value_of(make_shape(std::move(name.text), dtype, wire.value_or(dtype), std::move(shape)));
  tensor->input = reinterpret_cast<const void*>(input);  // NOLINT: an address from Python
  tensor->output = reinterpret_cast<void*>(output);      // NOLINT: an address from Python
  tensor->gpu = gpu;
  tensor->capacity = capacity;
  return tensor;
}

EntryBuilder call_of(Kind kind, Name name, std::uint32_t process_set, const Tensors& tensors,
                     std::uintptr_t stream) {
  EntryBuilder call(kind, std::move(name.text), process_set);
  for (const TensorArgument* tensor : tensors) {
    call.tensor(tensor->shape, tensor->input, tensor->output, tensor->gpu, stream_of(stream))
        .capacity(tensor->capacity);
  }
  return call;
}

// The parameters of the functions below are those of Python, see _core.pyi.

HandlePtr allreduce(const HolderPtr& self, Name name, const Tensors& tensors, int op,
                    double prescale, double postscale, std::optional<double> weight,
                    std::uint32_t process_set, py::object keep, bool blocking,
                    std::uintptr_t stream, std::string transaction, const LateCall* late) {
  EntryBuilder call = call_of(Kind::kAllreduce, std::move(name), process_set, tensors, stream);
  call.reduce(op, prescale, postscale).weigh(weight).transaction(std::move(transaction));
  if (late != nullptr) call.late(late->terms, late->skips);
  return submit(self, call, std::move(keep), blocking);
}

HandlePtr allgather(const HolderPtr& self, Name name, const Tensors& tensors,
                    std::uint32_t process_set, py::object keep, bool blocking,
                    std::uintptr_t stream, std::string transaction) {
  EntryBuilder call = call_of(Kind::kAllgather, std::move(name), process_set, tensors, stream);
  return submit(self, call.transaction(std::move(transaction)), std::move(keep), blocking);
}

HandlePtr reducescatter(const HolderPtr& self, Name name, const Tensors& tensors, int op,
                        double prescale, double postscale, std::uint32_t process_set,
                        py::object keep, bool blocking, std::uintptr_t stream,
                        std::vector<std::int64_t> splits) {
  EntryBuilder call = call_of(Kind::kReducescatter, std::move(name), process_set, tensors, stream);
  call.reduce(op, prescale, postscale).splits(std::move(splits));
  return submit(self, call, std::move(keep), blocking);
}

HandlePtr alltoall(const HolderPtr& self, Name name, const TensorArgument& tensor,
                   std::vector<std::int64_t> splits, std::uint32_t process_set, py::object keep,
                   bool blocking, std::uintptr_t stream) {
  EntryBuilder call = call_of(Kind::kAlltoall, std::move(name), process_set, {&tensor}, stream);
  return submit(self, call.splits(std::move(splits)), std::move(keep), blocking);
}

HandlePtr broadcast(const HolderPtr& self, Name name, const Tensors& tensors, int root,
                    std::uint32_t process_set, py::object keep, bool blocking,
                    std::uintptr_t stream) {
  EntryBuilder call = call_of(Kind::kBroadcast, std::move(name), process_set, tensors, stream);
  return submit(self, call.root(root), std::move(keep), blocking);
}

HandlePtr send(const HolderPtr& self, Name name, const TensorArgument& tensor, int to,
               py::object keep) {
  EntryBuilder call = call_of(Kind::kSend, std::move(name), 0, {&tensor}, 0);
  return submit(self, call.ranks({self->engine().rank(), to}), std::move(keep), /*blocking=*/false);
}

HandlePtr recv(const HolderPtr& self, Name name, const TensorArgument& tensor, int source,
               py::object keep) {
  EntryBuilder call = call_of(Kind::kSend, std::move(name), 0, {&tensor}, 0);
  return submit(self, call.ranks({source, self->engine().rank()}), std::move(keep),
                /*blocking=*/false);
}

HandlePtr barrier(const HolderPtr& self, Name name, std::uint32_t process_set, bool blocking) {
  EntryBuilder call(Kind::kBarrier, std::move(name.text), process_set);
  return submit(self, call, py::none(), blocking);
}

HandlePtr commit(const HolderPtr& self, Name name, std::string transaction,
                 std::uint32_t process_set) {
  EntryBuilder call(Kind::kCommit, std::move(name.text), process_set);
  return submit(self, call.transaction(std::move(transaction)), py::none(), /*blocking=*/false);
}

HandlePtr join(const HolderPtr& self, bool blocking) {
  EntryBuilder call(Kind::kJoin, std::string(kJoinName));
  return submit(self, call, py::none(), blocking);
}

HandlePtr add_process_set(const HolderPtr& self, Name name, std::vector<std::int64_t> ranks) {
  EntryBuilder call(Kind::kAddProcessSet, std::move(name.text));
  return submit(self, call.ranks(std::move(ranks)), py::none(), /*blocking=*/true);
}

HandlePtr remove_process_set(const HolderPtr& self, Name name, std::uint32_t process_set) {
  EntryBuilder call(Kind::kRemoveProcessSet, std::move(name.text));
  return submit(self, call.removes(process_set), py::none(), /*blocking=*/true);
}

using LinkTuple = std::tuple<int, int, int, int, int>;
using ProcessSetList = std::vector<std::pair<int, std::vector<int>>>;  // ids and ranks

HolderPtr make_engine(int rank, int size, std::vector<int> host_of,
                      const std::vector<LinkTuple>& links, int segment_fd, int event_fd,
                      int lifeline_fd, std::vector<std::string> nccl_folders, int trace_file,
                      bool trace_rounds, std::shared_ptr<PendingOperations> pending, int epoch,
                      ProcessSetList process_sets, std::int64_t clock_offset, bool control_tree) {
  Fd trace_fd(trace_file);
  OwnLink own{Fd(segment_fd), Fd(event_fd), Fd(lifeline_fd)};
  std::vector<PeerLink> peers;
  for (const auto& [peer, control, data, peer_segment, peer_event] : links) {
    peers.push_back({peer, Fd(control), Fd(data), Fd(peer_segment), Fd(peer_event)});
  }
  Config config = value_of(Config::from_environment());
  set_log_level(parse_log_level(config.log_level));
  auto trace = std::make_unique<Trace>();
  if (trace_fd.valid()) raise_if_error(trace->start(std::move(trace_fd), rank, trace_rounds));
  std::unique_ptr<Fabric> fabric;
  std::unique_ptr<Backend> backend = std::make_unique<SelfBackend>();
  if (size > 1) {
    fabric = value_of(connect_fabric({rank, size, std::move(host_of), control_tree}, std::move(own),
                                     std::move(peers), config));
    backend = std::make_unique<HostBackend>(*fabric, config);
  }
  GpuLibraries gpus = GpuLibraries::search(config, std::move(nccl_folders));
  std::optional<Engine::Elastic> elastic;
  if (pending != nullptr) elastic = {{epoch, std::move(process_sets)}, std::move(pending)};
  return std::make_shared<EngineHolder>(
      std::make_unique<Engine>(std::move(fabric), std::move(backend), std::move(config),
                               std::move(gpus), std::move(trace), elastic, clock_offset));
}

py::dict row_of_counters(const Counters& counters) {
  return py::dict("batches"_a = counters.batches.get(), "tensors"_a = counters.tensors.get(),
                  "bytes"_a = counters.bytes.get(), "cache_hits"_a = counters.cache_hits.get(),
                  "full_requests"_a = counters.full_requests.get(),
                  "messages_sent"_a = counters.messages_sent.get(),
                  "bytes_to_other_hosts"_a = counters.bytes_to_other_hosts.get(),
                  "bytes_unstaged"_a = counters.bytes_unstaged.get(),
                  "exchanges"_a = counters.exchanges.get(),
                  "exchange_us"_a = counters.exchange_us.get());
}

py::dict counters(const HolderPtr& self) { return row_of_counters(self->engine().counters()); }

// Texts that come from programs and peers may be cut within a character.
py::str text_of(const std::string& text) {
  PyObject* decoded =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

py::list list_of(const std::vector<int>& ranks) {
  py::list list;
  for (const int rank : ranks) list.append(rank);
  return list;
}

template <typename... Values>
py::list row_of(Values&&... values) {
  py::list row;
  (row.append(std::forward<Values>(values)), ...);
  return row;
}

double seconds_of(StepClock::Duration time) { return std::chrono::duration<double>(time).count(); }

py::object steps_of(const Live& live) {
  if (!live.steps) return py::none();
  py::list ranks;
  for (const StepClock::Rank& one : live.steps->ranks) {
    ranks.append(row_of(seconds_of(one.backward), seconds_of(one.waiting),
                        seconds_of(one.communicating), seconds_of(one.between), one.last,
                        seconds_of(one.late_between), seconds_of(one.late_backward),
                        seconds_of(one.held_up)));
  }
  return py::dict("count"_a = live.steps->steps, "seconds"_a = live.steps->seconds(),
                  "ranks"_a = ranks);
}

py::dict live(const HolderPtr& self) {
  Engine& engine = self->engine();
  const Live live = engine.live();
  const auto on_rank_0 = [&](LiveFigures::Clock::time_point when) {
    return seconds_of(when.time_since_epoch() + std::chrono::nanoseconds(engine.clock_offset()));
  };
  py::list events;
  for (const Event& event : live.events) {
    events.append(row_of(on_rank_0(event.time), text_of(event.kind), event.rank,
                         text_of(event.name), text_of(event.text)));
  }
  py::list stalled;
  for (const Stall& stall : live.stalls) {
    stalled.append(row_of(text_of(stall.name), seconds_of(live.now - stall.since),
                          list_of(stall.submitted), list_of(stall.missing)));
  }
  return py::dict("time"_a = on_rank_0(live.now), "began"_a = on_rank_0(live.began),
                  "counters"_a = row_of_counters(live.counters), "events"_a = events,
                  "steps"_a = steps_of(live), "stalled"_a = stalled);
}

void note(const HolderPtr& self, std::string kind, std::string name, std::string text) {
  self->engine().note(std::move(kind), std::move(name), std::move(text));
}

py::dict tunables(const HolderPtr& self) {
  const Tunables current = self->engine().tunables();
  py::dict row;
  for (const Tunable& one : kTunables) row[one.name] = current.*one.field;
  return row;
}

void shutdown(const HolderPtr& self) {
  if (forked()) return;  // the parent's world is not the child's to leave
  {
    const Unlocked unlocked;
    self->engine().shutdown();
  }
  self->release_orphans();
}

void start_trace(const HolderPtr& self, int file, bool rounds) {
  Fd owned(file);
  Engine& engine = self->engine();
  raise_if_error(engine.trace().start(std::move(owned), engine.rank(), rounds));
}

void stop_trace(const HolderPtr& self) {
  if (forked()) return;  // its writer lives in the parent only
  Trace& trace = self->engine().trace();
  const Unlocked unlocked;
  trace.stop();
}

void abort(const HolderPtr& self, const std::string& reason) {
  Engine& engine = self->engine();
  const Unlocked unlocked;
  engine.abort(reason);
}

void suspend(const HolderPtr& self, const std::string& reason) {
  Engine& engine = self->engine();
  const Unlocked unlocked;
  engine.suspend(reason);
}

std::unique_ptr<GradientMemoryObject> allocate_gradient_memory(const HolderPtr& self, int gpu,
                                                               std::size_t bytes) {
  Engine& engine = self->engine();
  Result<GradientMemory::Holder> memory = [&] {
    const Unlocked unlocked;
    return engine.allocate_gradient_memory(gpu, bytes);
  }();
  raise_if_error(memory.status());
  return std::make_unique<GradientMemoryObject>(std::move(memory.value()));
}

std::unique_ptr<SharedGradientMemoryObject> lend_gradient_memory(const HolderPtr& self,
                                                                 std::size_t bytes) {
  GradientArea::Part part = self->engine().lend_gradient_memory(bytes);
  if (part == nullptr) return nullptr;
  return std::make_unique<SharedGradientMemoryObject>(std::move(part));
}

}  // namespace

void register_engine(py::module_& module) {
  py::class_<TensorArgument>(module, "Tensor", py::is_final())
      .def(py::init(&make_tensor), py::arg("name"), py::arg("dtype"), py::arg("shape"),
           py::arg("input"), py::arg("output"), py::arg("gpu") = -1, py::arg("wire") = py::none(),
           py::arg("capacity") = 0)
      .def_property_readonly("name", [](const TensorArgument& self) { return self.shape.name; })
      .def_readonly("gpu", &TensorArgument::gpu);
  module.def(
      "utf8_of_name", [](const Name& name) { return py::bytes(name.text); }, py::arg("name"));
  register_handle(module);
  register_late_gradients(module);
  register_gradient_memory(module);
  register_pending_operations(module);
  const py::arg_v process_set = py::arg("process_set") = 0;
  const py::arg_v keep = py::arg("keep") = py::none();
  const py::arg_v blocking = py::arg("blocking") = false;
  const py::arg_v stream = py::arg("stream") = 0;
  const py::arg_v transaction = py::arg("transaction") = "";
  py::class_<EngineHolder, HolderPtr>(module, "Engine", py::is_final())
      .def(py::init(&make_engine), py::arg("rank"), py::arg("size"), py::arg("host_of"),
           py::arg("links") = std::vector<LinkTuple>(), py::arg("segment_fd") = -1,
           py::arg("event_fd") = -1, py::arg("lifeline_fd") = -1,
           py::arg("nccl_folders") = std::vector<std::string>(), py::arg("trace_file") = -1,
           py::arg("trace_rounds") = false, py::arg("pending") = py::none(), py::arg("epoch") = 0,
           py::arg("process_sets") = ProcessSetList(), py::arg("clock_offset") = 0,
           py::arg("control_tree") = false)
      .def("allreduce", &allreduce, py::arg("name"), py::arg("tensors"), py::arg("op"),
           py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("weight") = py::none(),
           process_set, keep, blocking, stream, transaction, py::arg("terms") = py::none())
      .def("allgather", &allgather, py::arg("name"), py::arg("tensors"), process_set, keep,
           blocking, stream, transaction)
      .def("reducescatter", &reducescatter, py::arg("name"), py::arg("tensors"), py::arg("op"),
           py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, process_set, keep, blocking,
           stream, py::arg("splits") = std::vector<std::int64_t>())
      .def("alltoall", &alltoall, py::arg("name"), py::arg("tensor"),
           py::arg("splits") = std::vector<std::int64_t>(), process_set, keep, blocking, stream)
      .def("broadcast", &broadcast, py::arg("name"), py::arg("tensors"), py::arg("root"),
           process_set, keep, blocking, stream)
      .def("send", &send, py::arg("name"), py::arg("tensor"), py::arg("to"), keep)
      .def("recv", &recv, py::arg("name"), py::arg("tensor"), py::arg("source"), keep)
      .def("barrier", &barrier, py::arg("name"), process_set, blocking)
      .def("commit", &commit, py::arg("name"), py::arg("transaction"), process_set)
      .def("join", &join, blocking)
      .def("add_process_set", &add_process_set, py::arg("name"), py::arg("ranks"))
      .def("remove_process_set", &remove_process_set, py::arg("name"), py::arg("process_set"))
      .def("allocate_gradient_memory", &allocate_gradient_memory, py::arg("gpu"), py::arg("bytes"))
      .def("lend_gradient_memory", &lend_gradient_memory, py::arg("bytes"))
      .def("abort", &abort, py::arg("reason"))
      .def("suspend", &suspend, py::arg("reason"))
      .def("commit_counts", [](const HolderPtr& self) { return self->engine().commit_counts(); })
      .def("shutdown", &shutdown)
      .def("start_trace", &start_trace, py::arg("file"), py::arg("rounds") = false)
      .def("stop_trace", &stop_trace)
      .def("core_table", &EngineHolder::core_table)
      .def("counters", &counters)
      .def("live", &live)
      .def("note_gradient", [](const HolderPtr& self) { self->engine().note_gradient(); })
      .def("note", &note, py::arg("kind"), py::arg("name"), py::arg("text"))
      .def("tunables", &tunables);
}

}  // namespace hvdlite
