// A world of several ranks: agrees with the others on the order of collectives, and runs them.
//
// Threads: one thread at a time is the runner, which holds the token (runner_token.h): the engine's
// own, or a caller blocked in wait(). Without work the engine's own sleeps without it. The
// destructor expects that shutdown() or abort() has returned.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/thread.h"
#include "engine/autotune.h"
#include "engine/executor.h"
#include "engine/negotiator.h"
#include "engine/parts.h"
#include "engine/runner_token.h"
#include "engine/world.h"

namespace hvdlite {

class PeerWorld : public World {
 public:
  // Borrows the parts, and starts the engine's thread, which calls `suspend` if the world ends by a
  // failure. `settled`: what an earlier world has found; rank 0 lets all ranks have its own, and
  // searches only where there is none.
  PeerWorld(EngineParts& parts, const std::optional<Tunables>& settled, Suspend suspend);

  Status submit(EntryPtr entry, bool blocking) override;
  bool wait(const Entry& entry, bool blocking, Deadline deadline) override;
  void abort(const std::string& reason) override;
  void shutdown() override;
  void suspend(const std::string& reason) override;
  Status status() const override;
  Tunables tunables() const override;
  std::optional<Tunables> settled() const override;

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
  void wake_runner();
  // A caller: takes the token if it is free, or, where it `asks`, comes to be within `patience`.
  bool take_turn(const Completion& completion, bool asks, std::chrono::microseconds patience);
  bool ending() const { return ending_.load() || leaving_.load(); }
  // Makes the runner end the world. The first cause stays.
  void request_end(Status cause);
  void stop_thread(Deadline patience);  // joins; breaks a running collective after `patience`

  EngineParts& parts_;
  Waiter& waiter_;  // the fabric's
  const Suspend suspend_;
  RunnerToken token_;

  // The runner's, guarded by the token.
  Negotiator negotiator_;
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
