// Releases the GIL while a thread waits.
#pragma once

#include <Python.h>
#include <cxxabi.h>

#include <chrono>
#include <thread>

namespace hvdlite {

// Never returns. This costs nothing: the process is about to end.
[[noreturn]] inline void sleep_forever() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

// Runs work that asks for the GIL. CPython up to 3.13 ends a daemon thread that asks for the GIL
// once the interpreter has begun to end, by pthread_exit. That unwinds the stack: through
// destructors of Python objects, which need the GIL, and through noexcept functions, which abort
// the process. Such a thread stays in here instead, as it does in later Pythons.
template <typename Work>
void asleep_at_the_end(Work&& work) {
  try {
    work();
  } catch (abi::__forced_unwind&) {
    sleep_forever();
  }
}

// Releases the GIL as long as this object lives; the thread holds the GIL before and after.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    asleep_at_the_end([this] { PyEval_RestoreThread(state_); });
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace hvdlite
