// The objects of an engine that Python holds: the engine itself, and a handle for each submitted
// collective.
//
// Any thread that holds the GIL may call them; they release it while a thread waits. They raise
// errors as the classes of hvdlite.errors. Python owns the handles; they share the engine, which so
// lives as long as the last of them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "engine/c_api.h"
#include "engine/engine.h"
#include "engine/entry.h"
#include "python/bindings.h"

namespace hvdlite {

inline CudaStream stream_of(std::uintptr_t handle) {
  return reinterpret_cast<CudaStream>(handle);  // NOLINT: a handle from Python
}

class EngineHolder;
struct ReleaseCall;

// One submitted collective. `keep` must outlive the operation, and may only be released under the
// GIL. So a handle that is dropped early leaves `keep` with the EngineHolder, and Python's main
// thread releases it once the operation has ended.
class HandleObject {
 public:
  HandleObject(std::shared_ptr<EngineHolder> holder, EntryPtr entry, pybind11::object keep,
               bool blocking)
      : holder_(std::move(holder)),
        entry_(std::move(entry)),
        keep_(std::move(keep)),
        blocking_(blocking) {}
  ~HandleObject();
  HandleObject(const HandleObject&) = delete;
  HandleObject& operator=(const HandleObject&) = delete;

  bool done() const { return entry_->completion->done(); }
  bool released() const { return entry_->completion->released(); }
  // `fatal`: the caller ends the world when the timeout has passed.
  void wait(std::optional<double> timeout, std::optional<std::uintptr_t> stream,
            bool fatal = false);
  std::vector<std::int64_t> first_dimensions() const {
    return entry_->completion->first_dimensions;
  }
  int set_id() const { return entry_->completion->set_id; }
  int last_joined() const { return entry_->completion->last_joined; }
  int members() const { return entry_->completion->members; }
  int epoch() const { return entry_->completion->epoch; }
  pybind11::object take_output(std::size_t index);
  void copy_output(std::size_t index, std::uintptr_t target, std::uintptr_t stream);
  std::uintptr_t stream() const;

 private:
  void wait_until_done(const Deadline& deadline, bool fatal);
  void wait_for_device(std::optional<std::uintptr_t> stream, const Deadline& deadline);
  [[noreturn]] void raise_timeout() const;
  Completion::Output& output(std::size_t index);

  std::shared_ptr<EngineHolder> holder_;
  EntryPtr entry_;
  pybind11::object keep_;
  bool blocking_;
};

// Owns the engine, and the Python objects of operations whose handles were dropped. The GIL guards
// it.
class EngineHolder : public std::enable_shared_from_this<EngineHolder> {
 public:
  explicit EngineHolder(std::unique_ptr<Engine> engine)
      : engine_(std::move(engine)), core_table_(make_core_table(*engine_)) {}
  ~EngineHolder();

  // Raises ForkedError in a child of fork(), which has neither the engine's threads nor peers.
  Engine& engine() const {
    raise_if_error(check_not_forked());
    return *engine_;
  }
  std::uintptr_t core_table() const {
    return reinterpret_cast<std::uintptr_t>(&core_table_);  // NOLINT: an address for Python
  }
  // Keeps the object until its operation has ended: on the host exactly so long; of GPU tensors,
  // whose end is an event, until the next submission at the latest.
  void adopt(EntryPtr entry, pybind11::object keep);
  void release_orphans();

 private:
  using Orphans = std::vector<std::pair<EntryPtr, pybind11::object>>;
  // Those of engines that are gone, whose operations go on in the next world of an elastic job.
  static Orphans& unowned();

  std::unique_ptr<Engine> engine_;
  const HvdliteCore core_table_;
  Orphans orphans_;
  std::shared_ptr<ReleaseCall> release_call_;  // made with the first orphan
};

using HandlePtr = std::unique_ptr<HandleObject>;

// Late gradients, as Python gives them for an all-reduce.
struct LateCall {
  LateTerms terms;
  bool skips = false;
};

// Submits what the builder has made. `keep` holds the memory of the tensors, and `blocking` says
// that the caller waits at once. Raises the error of an entry that the engine does not take.
HandlePtr submit(const std::shared_ptr<EngineHolder>& holder, EntryBuilder& call,
                 pybind11::object keep, bool blocking);

void register_handle(pybind11::module_& module);

// A tensor of a call, as Python describes it: `_core.Tensor`. It holds no memory alive.
struct TensorArgument {
  TensorShape shape;
  const void* input = nullptr;
  void* output = nullptr;
  int gpu = kHostMemory;
  std::uint64_t capacity = 0;
};

}  // namespace hvdlite
