// How a process knows that each of its threads that could submit something waits, which it reports
// to rank 0 (Engine::note_blocked()). The proof of deadlocks assumes it.
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
// wait by an exception; where TensorFlow runs a function for which no thread of Python waits; and
// nowhere else. HVDLITE_DEADLOCK_GRACE=0 switches the proof off. A thread of Python that waits for
// an operation of TensorFlow does not wait in Handle.wait(), so that its process is never taken for
// blocked.
//
// The GIL guards all of it, and is not released between the look at the threads and the report.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace hvdlite {

class ThreadWait;

class LongWaits {
 public:
  // Those of this process. Never destroyed: Python may end before it.
  static LongWaits& all();

  // The thread has waited for another slice of this length. A wait that went on has ended.
  void goes_on(const ThreadWait& wait, std::chrono::nanoseconds slice);
  void ended(const ThreadWait& wait);

 private:
  struct Since {
    std::chrono::steady_clock::time_point begun;
    unsigned long thread = 0;  // once the wait is long
  };

  // Tells rank 0 what all threads that could submit wait for; with nothing: not any more. The GIL
  // was held since that was looked at.
  static void report(Engine& engine, std::vector<EntryPtr> waits,
                     std::vector<std::string> places = {});
  // Whether a thread of Python may submit, besides those in long waits.
  bool may_submit() const;
  // What the threads in long waits wait for; nothing where this is not the engine's alone. And
  // where each of them does.
  std::vector<EntryPtr> waits_of_all(const Engine& engine) const;
  std::vector<std::string> places_of_all() const;

  std::map<const ThreadWait*, Since> waits_;
};

// A thread of Python that waits for an operation of this engine, as long as this object lives.
class ThreadWait {
 public:
  // `returns_early`: it may end by a timeout, after which the thread might submit something.
  ThreadWait(Engine& its_engine, const EntryPtr& its_entry, bool returns_early)
      : engine(its_engine), entry(its_entry), returns(returns_early) {}
  ~ThreadWait() {
    if (went_on_) LongWaits::all().ended(*this);
  }
  ThreadWait(const ThreadWait&) = delete;
  ThreadWait& operator=(const ThreadWait&) = delete;

  // It has waited for another slice of this length, and holds the GIL.
  void goes_on(std::chrono::nanoseconds slice) {
    went_on_ = true;
    LongWaits::all().goes_on(*this, slice);
  }

  Engine& engine;
  const EntryPtr& entry;
  const bool returns;

 private:
  bool went_on_ = false;
};

}  // namespace hvdlite
