// One rank of one world: takes collectives from any thread, agrees with the other ranks on their
// order, runs them, and wakes the threads that wait.
//
// This is the face: it checks what can be checked on this rank and hands the rest to its World,
// which differs between a world of several ranks (peer_world.h) and of one (lone_world.h).
// Threads: all calls come from any thread.
// Errors: the first sticky error ends the world for this rank: it is told to the peers, every entry
// in flight ends with it, and so does every later call. Other errors concern one entry.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/entry.h"
#include "engine/parts.h"
#include "engine/pending_operations.h"
#include "engine/world.h"

namespace hvdlite {

// What an engine says of itself; moments are those of this rank's clock.
struct Live {
  LiveFigures::Clock::time_point now;
  LiveFigures::Clock::time_point began;  // when the engine did
  Counters counters;
  std::vector<Event> events;  // since the last call, the oldest first
  std::uint64_t dropped_events = 0;
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
  Status submit(const EntryPtr& entry, bool blocking) { return world_->submit(entry, blocking); }
  // True once `entry` is done, false at the deadline. Works as the runner where that is quicker.
  bool wait(const Entry& entry, bool blocking, Deadline deadline) {
    return world_->wait(entry, blocking, deadline);
  }
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
  // Allocates gradient memory on a GPU, see gpu/gradient_memory.h. Errors are those of
  // GpuPlane::mark(), and kOutOfMemory.
  Result<GradientMemory::Holder> allocate_gradient_memory(int gpu, std::size_t bytes) {
    return parts_.gpus.allocate_gradient_memory(gpu, bytes);
  }
  // Lends host memory that the ranks of this host share (transport/gradient_area.h); null where
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
  void suspend(const std::string& reason) { world_->suspend(reason); }
  // Elastic jobs: the commits that this rank has completed. Empty in a world of one.
  CommitCounts commit_counts() const {
    return parts_.commits == nullptr ? CommitCounts() : parts_.commits->counts();
  }
  bool elastic() const { return pending_ != nullptr; }
  // The highest id of a process set so far, in this world or one before it; 0: there was none.
  int highest_set() const { return parts_.sets.highest(); }

  // The sticky error, or OK.
  Status status() const { return world_->status(); }
  Counters counters() const { return parts_.counters; }
  // For the live view. Takes microseconds, and waits for nobody.
  Live live();
  // Adds an event of this rank to those that live() tells.
  void note(std::string kind, std::string name, std::string text) {
    parts_.live.events.add(std::move(kind), rank(), std::move(name), std::move(text));
  }
  // Nanoseconds from this host's monotonic clock to that of rank 0's host.
  std::int64_t clock_offset() const { return parts_.live.clock_offset; }
  // Where this process says that all its threads wait; null where there is no proof of deadlocks.
  BlockedReport* blocked_report() { return parts_.blocked ? &*parts_.blocked : nullptr; }
  // Who was late in late gradients.
  const Attendance& attendance() const { return parts_.late.attendance(); }
  // The settings that this rank's collectives use now.
  Tunables tunables() const { return world_->tunables(); }
  // Those that a search for better ones has ended with, in this world or one before it.
  std::optional<Tunables> settled() const { return world_->settled(); }
  // Where the time of this rank goes; its owner starts and stops it.
  Trace& trace() { return *parts_.trace; }

 private:
  // Fills in the ranks of the set that the entry removes.
  Status name_removed_ranks(Entry& entry) const;
  // Marks when the entry's GPU tensors are ready.
  Status mark_ready(Entry& entry);

  std::atomic<std::int64_t> began_at_{0};  // see note_gradient(); 0: not any more
  EngineParts parts_;
  const std::shared_ptr<PendingOperations> pending_;  // It is null unless the job is elastic.
  const std::unique_ptr<World> world_;                // last: its thread uses the parts
};

}  // namespace hvdlite
