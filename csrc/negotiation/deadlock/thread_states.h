// What each thread of this process does, as the kernel tells it. Linux only, any thread.
//
// A thread that sleeps in a futex of this process, without a time limit, does not run before
// another thread of the process wakes it: nothing from outside can. If its number of switches is
// the same at two looks, and it slept so at both, it has slept all the time between.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hvdlite {

struct ThreadState {
  enum class Kind {
    kUntilWoken,  // it sleeps until another thread of this process wakes it
    kForATime,    // it sleeps until then, or until some time has passed
    kOther,       // it runs, or waits for something else, such as a file
  };

  int id = 0;  // as gettid()
  std::string name;
  Kind kind = Kind::kOther;
  std::uint64_t switches = 0;  // how often it has given up a processor so far
};

// All threads, by ascending id; nothing where the kernel does not tell, as in some sandboxes.
std::optional<std::vector<ThreadState>> thread_states();

}  // namespace hvdlite
