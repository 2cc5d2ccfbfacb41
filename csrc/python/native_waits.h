// How a process knows that it is blocked (python/long_waits.h) although threads of
// TensorFlow submit operations without Python, and wait for them without Handle.wait().
//
// Such a process is taken for blocked if operations are in flight and each of its threads sleeps
// until another one wakes it (negotiation/deadlock/thread_states.h), has done so for three times
// the grace, and nothing was submitted and nothing ended in that time. Only three kinds of threads
// do not count: the engine's, those in long waits, and Python's threads that submit nothing
// (long_waits.h). So what computes, reads a file, or waits for another process is never taken for
// blocked, nor is a thread with Python frames that sleeps for some time.
//
// Between two looks, the instant before the second look is when all threads slept. The operations
// in flight are listed at that instant. If one of them ends later, the report that names it is
// void.
//
// A thread without Python frames may sleep for some time, because tf.data has threads that always
// do. The proof is wrong where a kernel pauses so, for example between two attempts to read a
// remote file, and its function then submits what another rank waits for although an operation of
// this function that was submitted before has no answer; where a signal handler submits; and
// nowhere else. Where the kernel does not tell what threads do, nothing is proven, and so it is
// while CUDA's threads poll.
//
// The GIL guards all of it, and is not released between the look at the threads and the report.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "negotiation/deadlock/thread_states.h"
#include "python/handle.h"

namespace hvdlite {

class NativeWaits {
 public:
  explicit NativeWaits(std::shared_ptr<EngineHolder> holder);

  // Looks, and reports. Returns the seconds until the next look; nothing: there is none.
  std::optional<double> look();

 private:
  using Clock = std::chrono::steady_clock;
  // The number says how often the thread has given up a processor; 0: it sleeps for a time.
  using Sleepers = std::map<int, std::uint64_t>;

  // All threads that count; nothing if one of them does not sleep.
  static std::optional<Sleepers> sleepers(const std::map<unsigned long, int>& python_threads);
  void report(std::vector<EntryPtr> waits);

  const std::shared_ptr<EngineHolder> holder_;
  std::vector<EntryPtr> waits_;  // at the last look
  std::optional<Sleepers> sleepers_;
  Clock::time_point since_;  // when these were new
  bool reported_ = false;
};

// Also has the process's waits observed.
void register_deadlock_proof(pybind11::module_& module);

}  // namespace hvdlite
