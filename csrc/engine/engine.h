// One rank of one world: takes collectives from any thread, agrees with the other ranks on their
// order, runs them, and wakes whoever waits.
//
// Threads: public calls come from any thread. One thread at a time is the runner (turn.h): the
// engine's own, or a caller blocked in wait(). A world of one has neither thread nor fabric: a
// collective is done when enqueue() returns.
// Errors: the first sticky error ends the world for this rank: it is told to the peers, every entry
// in flight ends with it, and so does every later call. Other errors concern one entry.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/config.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "engine/autotune/autotune.h"
#include "engine/entry.h"
#include "engine/executor.h"
#include "engine/negotiator.h"
#include "engine/runner_token.h"
#include "engine/tensor_queue.h"
#include "engine/timeline.h"
#include "gpu/gpu_plane.h"
#include "negotiation/process_set.h"
#include "transport/fabric.h"

namespace hvdlite {

class Engine {
 public:
  // Starts the engine's thread. `fabric` is null for a world of one; `backend` is the host's;
  // `trace` may be on already.
  Engine(std::unique_ptr<Fabric> fabric, std::unique_ptr<Backend> backend, Config config,
         GpuLibraries gpu_libraries = GpuLibraries::search(Config(), {}),
         std::unique_ptr<Trace> trace = std::make_unique<Trace>());
  ~Engine();  // shuts down

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Submits an entry (request, inputs, outputs, gpu, weight filled in). The memory it points to
  // stays valid until its completion is released(). With `blocking` the caller promises to wait()
  // for it at once. kInvalidArgument, kDuplicateName, or the sticky error: then the entry was not
  // taken.
  Status enqueue(EntryPtr entry, bool blocking);
  // The GPU whose memory `address` is; of no address, the one whose context is current in this
  // thread. Any thread.
  Result<int> gpu_of(const void* address) { return gpus_.ordinal_of(address); }
  // Allocates gradient memory on a GPU, see gpu/gradient_memory.h. Any thread. Errors are those of
  // GpuPlane::mark(), and kOutOfMemory.
  Result<GradientMemory::Holder> allocate_gradient_memory(int gpu, std::size_t bytes) {
    return gpus_.allocate_gradient_memory(gpu, bytes);
  }
  // True once `entry` is done, false at the deadline. Works as the runner where that is quicker.
  bool wait(const Entry& entry, bool blocking, Deadline deadline);

  // The members of a process set, null if there is none of this id. Sets are added and removed by
  // entries of the kinds kAddProcessSet (whose id is in first_dimensions of the completion) and
  // kRemoveProcessSet.
  GroupPtr process_set(std::uint32_t id) const { return sets_.get(id); }

  // Ends the world on every rank with this reason. Returns when the peers have been told.
  void abort(const std::string& reason);
  // Leaves cleanly: what is in flight may still end (within shutdown_timeout), other entries fail
  // with kShutdown, the peers are told. Idempotent, any thread.
  void shutdown();

  // The sticky error, or OK.
  Status status() const;
  Counters counters() const;
  // The settings that this rank's collectives use now.
  Tunables tunables() const;
  // Where the time of this rank goes; to be started and stopped by whoever wants to know.
  Trace& trace() { return *trace_; }

 private:
  Status check_change(Entry& entry) const;
  // A world of one.
  Status run_alone(const EntryPtr& entry);
  Status execute_alone(const EntryPtr& entry);

  // The runner's part.
  void background();
  bool run_once();  // false: nothing was there to do
  void run_rounds(std::vector<Round>& rounds);
  void tune(const Round& round);  // before it runs
  // Who sleeps: a caller that drives the engine, its own thread, or that while this rank leaves.
  enum class Sleeper { kForeground, kBackground, kLeaving };
  void sleep(Deadline deadline, Sleeper sleeper);
  void drain();  // lets what is in flight end before leaving
  void drive(const Completion& completion, Deadline deadline);
  void end_world();  // tells the peers, fails everything in flight
  void fail(const EntryPtr& entry, const Status& cause);
  void look_at_gpus();  // an error there ends the world
  bool ending() const { return ending_.load() || leaving_.load(); }

  // From any thread: makes the runner end the world. The first cause stays.
  void request_end(Status cause);
  void stop_thread(Deadline patience);  // joins; breaks a running collective after `patience`

  const int rank_;
  const int size_;
  const Config config_;
  const std::unique_ptr<Trace> trace_;  // before all that writes to it
  Timeline timeline_{*trace_};
  std::unique_ptr<Fabric> fabric_;
  std::unique_ptr<Backend> backend_;
  GpuPlane gpus_;
  ProcessSets sets_;
  TensorQueue queue_{timeline_};
  Turn turn_;

  // Of the runner (guarded by the turn).
  Counters counters_;  // any thread may read it
  std::unique_ptr<Negotiator> negotiator_;
  Executor executor_;
  std::unique_ptr<Autotune> autotune_;  // rank 0, while it searches
  Deadline next_gpu_look_ = Deadline::after({});
  std::uint64_t collectives_ = 0;  // entries that ended well

  mutable Mutex mutex_;
  Tunables tunables_ HVDLITE_GUARDED_BY(mutex_);
  Status sticky_ HVDLITE_GUARDED_BY(mutex_);
  bool stopped_ HVDLITE_GUARDED_BY(mutex_) = false;
  Condition stopped_changed_;
  std::atomic<bool> ending_{false};   // sticky_ was set; the runner acts on it
  std::atomic<bool> leaving_{false};  // shutdown was asked for

  Mutex alone_mutex_;  // a world of one executes in its callers, one at a time
  Mutex join_mutex_;
  std::unique_ptr<Thread> thread_;  // last: it uses all of the above
};

}  // namespace hvdlite
