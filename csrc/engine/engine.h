// One rank of one world: takes collectives from any thread, agrees with the other ranks on their
// order, runs them, and wakes the threads that wait.
//
// Threads: all calls come from any thread. One thread at a time is the runner, which alone executes
// collectives: it holds the token (runner_token.h), and is the engine's own, or a caller blocked in
// wait(). Without work the engine's own sleeps without it. A world of one rank has neither a thread
// nor a fabric: the thread that submits a collective executes it.
// Errors: the first sticky error ends the world for this rank: it is told to the peers, every entry
// in flight ends with it, and so does every later call. Other errors concern one entry.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/autotune.h"
#include "engine/entry.h"
#include "engine/executor.h"
#include "engine/negotiator.h"
#include "engine/parts.h"
#include "engine/pending_operations.h"
#include "engine/runner_token.h"

namespace hvdlite {

// What an engine says of itself; moments are those of this rank's clock.
struct Live {
  LiveFigures::Clock::time_point now;
  LiveFigures::Clock::time_point began;  // when the engine did
  Counters counters;
  std::vector<Event> events;               // since the last call, the oldest first
  std::optional<StepClock::Report> steps;  // on rank 0
  std::vector<Stall> stalls;               // on rank 0, the longest first
};

class Engine {
 public:
  // An elastic job gives its world, and the pending operations that all its engines share.
  struct Elastic {
    ElasticWorld world;
    std::shared_ptr<PendingOperations> pending;
  };
  // Starts the engine's thread. `fabric` is null for a world of one; `backend` is the host's;
  // `trace` may be on already. `clock_offset`: nanoseconds from this host's monotonic clock to that
  // of rank 0's host.
  Engine(std::unique_ptr<Fabric> fabric, std::unique_ptr<Backend> backend, Config config,
         GpuLibraries gpu_libraries = GpuLibraries::search(Config(), {}),
         std::unique_ptr<Trace> trace = std::make_unique<Trace>(),
         const std::optional<Elastic>& elastic = std::nullopt, std::int64_t clock_offset = 0);
  ~Engine();  // shuts down

  int rank() const { return parts_.rank; }
  int size() const { return parts_.size; }

  // Submits an entry (request, inputs, outputs, gpu, weight filled in). The memory it points to
  // stays valid until its completion is released(). With `blocking` the caller promises to wait()
  // for it at once. In a world of one it is done when this returns. kInvalidArgument,
  // kDuplicateName, or the sticky error: then the entry was not taken. In an elastic job what comes
  // after the world has ended by a failure becomes pending.
  Status enqueue(const EntryPtr& entry, bool blocking);
  // The two halves of enqueue(), without the pending operations: the checks, and what the entry
  // needs of this engine; and the rest. submit() fails with a sticky error only where the world has
  // ended.
  Status check(Entry& entry);
  Status submit(const EntryPtr& entry, bool blocking);
  // True once `entry` is done, false at the deadline. Works as the runner where that is quicker.
  bool wait(const Entry& entry, bool blocking, Deadline deadline);
  // This thread's program has waited for a result, of any engine: a step has a boundary here
  // (StepClock).
  static void note_wait();
  // The program has its first gradient of a step, and submits it later: backward began by now.
  void note_gradient() { began_at_.store(trace_now(), std::memory_order_relaxed); }

  // Calls `call` with the engine to which what is submitted here goes now: in an elastic job that
  // of the present world, if there is one. `call` must not submit.
  void with_present(const std::function<void(Engine&)>& call);
  bool shares_entries_with(const Engine& other) const {
    return this == &other || (pending_ != nullptr && pending_ == other.pending_);
  }

  // The GPU whose memory `address` is; where it is null, the one whose context is current in this
  // thread.
  Result<int> gpu_of(const void* address) { return parts_.gpus.ordinal_of(address); }
  // Allocates gradient memory on a GPU, see gpu/device_workspace.h. Errors are those of
  // GpuPlane::mark(), and kOutOfMemory.
  Result<GradientMemory::Holder> allocate_gradient_memory(int gpu, std::size_t bytes) {
    return parts_.gpus.allocate_gradient_memory(gpu, bytes);
  }
  // Lends host memory that the ranks of this host share (transport/segment.h); null where
  // there is none, or no room in it.
  GradientArea::Part lend_gradient_memory(std::size_t bytes) {
    return parts_.fabric == nullptr ? nullptr : parts_.fabric->gradients->lend(bytes);
  }

  // The members of a process set, null where there is no set of this id. Sets are added and removed
  // by entries of the kinds kAddProcessSet (whose completion has the set_id) and kRemoveProcessSet.
  GroupPtr process_set(std::uint32_t id) const { return parts_.sets.get(id); }

  // Ends the world on every rank with this reason. Returns when the peers have been told. In an
  // elastic job the others go on without this rank, whose own entries fail.
  void abort(const std::string& reason);
  // Leaves cleanly: what is in flight may still end (within shutdown_timeout), other entries fail
  // with kShutdown, the peers are told. What is pending fails, too. Idempotent.
  void shutdown();
  // Elastic jobs: ends the world on this rank for this reason. Returns when all that was in flight
  // is pending.
  void suspend(const std::string& reason);
  // Elastic jobs: the commits that this rank has completed. Empty in a world of one.
  CommitCounts commit_counts() const {
    return parts_.commits == nullptr ? CommitCounts() : parts_.commits->counts();
  }
  bool elastic() const { return pending_ != nullptr; }
  // The highest id of a process set so far, in this world or one before it; 0: there was none.
  int highest_set() const { return parts_.sets.highest(); }

  // The sticky error, or OK.
  Status status() const;
  Counters counters() const { return parts_.counters; }
  // For the live view. Takes microseconds, and waits for nobody.
  Live live();
  // Adds an event of this rank to those that live() tells.
  void note(std::string kind, std::string name, std::string text) {
    parts_.live.events.add(std::move(kind), rank(), std::move(name), std::move(text));
  }
  // Nanoseconds from this host's monotonic clock to that of rank 0's host.
  std::int64_t clock_offset() const { return parts_.live.clock_offset; }
  // All threads of this process that could submit something wait for these entries, at these places
  // (Blocked::places); with none of them: not any more. The next submission makes it void.
  void note_blocked(std::vector<EntryPtr> waits, std::vector<std::string> places = {});
  // How long they have waited when that is noted; kForever where there is no proof of deadlocks.
  Patience blocked_after() const {
    const double grace = parts_.config.deadlock_grace;
    return parts_.fabric == nullptr || grace <= 0 ? kForever : delay_of(grace / 2);
  }
  // Who was late in late gradients.
  const Attendance& attendance() const { return parts_.late.attendance(); }
  // The settings that this rank's collectives use now.
  Tunables tunables() const;
  // Those that a search for better ones has ended with, in this world or one before it.
  std::optional<Tunables> settled() const;
  // Where the time of this rank goes; its owner starts and stops it.
  Trace& trace() { return *parts_.trace; }

 private:
  // Which thread sleeps as the runner: a caller that drives the engine, or the engine's own while
  // this rank leaves.
  enum class Sleeper { kForeground, kLeaving };

  // The functions of the runner.
  void background();
  bool run_once();  // false: there was nothing to do
  void run_rounds();
  // Runs a part of the runner's work. Where memory lacks, ends the world and returns true.
  template <typename Work>
  bool unless_out_of_memory(Work work);
  void tune(const Round& round);  // before it runs
  void sleep(Deadline deadline, Sleeper sleeper);
  bool stand_by();  // false: the background, which sleeps here, is not the runner any more
  bool has_work();  // There is something to do now.
  // Until when the runner may sleep, if nothing wakes it; and while no thread waits for a result.
  Deadline next_look() const;
  Deadline next_duty() const;
  void drain();  // lets what is in flight end before leaving
  void drive(const Completion& completion, Deadline deadline);
  void give_back();  // the token, by a caller
  void end_world();  // tells the peers, fails or suspends everything in flight
  void add_interrupted(std::vector<EntryPtr>& entries);  // Memory lacked for their turn.
  void fail(const EntryPtr& entry, const Status& cause);
  void watch_peers();
  void look_at_gpus();  // an error there ends the world

  // The functions of any thread.
  // Fills in the ranks of the set that the entry removes.
  Status name_removed_ranks(Entry& entry) const;
  // Marks when the entry's GPU tensors are ready.
  Status mark_ready(Entry& entry);
  Status run_alone(const EntryPtr& entry);  // a world of one: as submit()
  void leave();                             // as shutdown(), but for what is pending
  void stop(Status cause);                  // ends the world, and returns when it has ended
  void wake_runner();
  // A caller: takes the token if it is free, or, where it `asks`, comes to be within `patience`.
  bool take_turn(const Completion& completion, bool asks, std::chrono::microseconds patience);
  bool ending() const { return ending_.load() || leaving_.load(); }
  // Makes the runner end the world. The first cause stays.
  void request_end(Status cause);
  void stop_thread(Deadline patience);  // joins; breaks a running collective after `patience`

  EngineParts parts_;
  const std::shared_ptr<PendingOperations> pending_;  // It is null unless the job is elastic.
  std::atomic<std::int64_t> began_at_{0};             // see note_gradient(); 0: not any more
  Waiter* waiter_ = nullptr;                          // the fabric's
  RunnerToken token_;
  Mutex alone_;  // In a world of one its holder is the runner.

  // The runner's, guarded by the token.
  std::unique_ptr<Negotiator> negotiator_;  // null in a world of one
  Executor executor_;
  std::unique_ptr<Autotune> autotune_;  // rank 0, while no earlier world has found settings
  Deadline next_gpu_look_ = Deadline::after({});
  std::uint64_t collectives_ = 0;  // entries that ended well
  std::vector<EntryPtr> taken_;    // The turn under way has taken them.
  std::vector<Round> rounds_;      // The turn under way runs them.
  const Round* running_ = nullptr;
  std::vector<EntryPtr> unfinished_;  // elastic jobs: of rounds that failed

  std::atomic<bool> ending_{false};     // sticky_ was set; the runner acts on it
  std::atomic<bool> leaving_{false};    // shutdown() was called
  std::atomic<bool> aborted_{false};    // abort() was called
  std::atomic<bool> suspended_{false};  // suspend() was called

  mutable Mutex mutex_;
  Tunables tunables_ HVDLITE_GUARDED_BY(mutex_);
  std::optional<Tunables> settled_ HVDLITE_GUARDED_BY(mutex_);
  Status sticky_ HVDLITE_GUARDED_BY(mutex_);
  bool stopped_ HVDLITE_GUARDED_BY(mutex_) = false;
  Condition stopped_changed_;

  Mutex join_mutex_;                // guards the end of the thread
  std::unique_ptr<Thread> thread_;  // last: it uses all of the above
};

}  // namespace hvdlite
