// How a process knows that each of its threads that could submit something waits, which it reports
// to rank 0 (negotiation/deadlock/blocked_report.h). The proof of deadlocks assumes it.
//
// Any thread may submit that Python runs, or will run. So the process is taken for blocked only if
// every thread that has Python frames now waits in Handle.wait(), without a timeout or with one
// that ends the world, and has done so for half of the grace. Threads whose code is known to submit
// nothing do not count: threads of hvdlite in which no function of the user runs, feeders of
// multiprocessing's queues and of a DataLoader, idle workers of a ThreadPoolExecutor, progress bars
// and writers of logs (the table is in the .cc file). All is looked at again while the waits last.
//
// A thread without Python frames is one that runs native code only, such as those in which autograd
// evaluates functions of a GPU. Such a thread is taken for one that submits nothing by itself:
// while autograd works, the thread that called backward() has a frame and does not wait here.
// (Where the end of that backward waits here, in autograd's thread, the one that called backward()
// does not count.) The proof is wrong where a native thread calls Python for the first time after
// the grace, and submits what another rank waits for; where a signal handler submits, or ends a
// wait by an exception; and nowhere else. HVDLITE_DEADLOCK_GRACE=0 switches the proof off.
// TensorFlow's own threads submit without Python: python/native_waits.h looks at them, too, and
// does so instead of this where a process uses hvdlite.tensorflow.
//
// The GIL guards all of it, and is not released between the look at the threads and the report.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "engine/engine.h"

namespace hvdlite {

// One wait of a thread, as long as this object lives.
class LongWait {
 public:
  // `returns`: it may end by a timeout, after which the thread might submit something.
  LongWait(Engine& engine, const EntryPtr& entry, bool returns)
      : engine_(engine), entry_(entry), returns_(returns) {}
  ~LongWait();
  LongWait(const LongWait&) = delete;
  LongWait& operator=(const LongWait&) = delete;

  // The thread has waited for another slice of this length.
  void goes_on(std::chrono::nanoseconds slice);
  // How long waits of this engine last before they count; none: they never do.
  static std::optional<Patience> long_wait(const Engine& engine);
  // Tells rank 0 what all threads that could submit wait for; with nothing: not any more. The GIL
  // was held since that was looked at.
  static void report(Engine& engine, std::vector<EntryPtr> waits);
  // From now on native threads may submit, and NativeWaits reports.
  static void note_native_submitters();
  // The identifiers of Python's threads that may submit, besides those in long waits.
  static std::vector<unsigned long> threads_that_may_submit();
  // What the threads in long waits wait for; nothing where this is not the engine's alone.
  static std::vector<EntryPtr> waits_of_all(const Engine& engine);
  static bool any();

 private:
  Engine& engine_;
  const EntryPtr& entry_;
  const bool returns_;
  std::optional<std::chrono::steady_clock::time_point> begun_;
  unsigned long thread_ = 0;  // once the wait is long
};

}  // namespace hvdlite
