// What the kernel says of a thread that waits for another one, for a time, or for something else.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <thread>

#include "base/mutex.h"
#include "base/thread.h"
#include "check.h"
#include "negotiation/deadlock/thread_states.h"

using namespace hvdlite;

namespace {

using namespace std::chrono_literals;
using Sleep = ThreadState::Kind;

std::optional<ThreadState> state_of(const std::string& name) {
  const auto states = thread_states();
  if (!states) return std::nullopt;
  const auto found = std::find_if(states->begin(), states->end(),
                                  [&](const ThreadState& one) { return one.name == name; });
  return found == states->end() ? std::nullopt : std::optional<ThreadState>(*found);
}

// Whether the thread of that name is seen so before long.
bool becomes(const std::string& name, Sleep kind) {
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (std::chrono::steady_clock::now() < deadline) {
    const auto state = state_of(name);
    if (state && state->kind == kind) return true;
    std::this_thread::yield();
  }
  return false;
}

// Ends the waits of the threads below.
struct Gate {
  Mutex mutex;
  Condition opened;
  bool open HVDLITE_GUARDED_BY(mutex) = false;

  void wait(std::chrono::seconds longest) {
    MutexLock lock(mutex);
    const auto end = std::chrono::steady_clock::now() + longest;
    while (!open) {
      if (longest == 0s) {
        opened.wait(mutex);
      } else {
        (void)opened.wait_until(mutex, end);
      }
    }
  }
  void pass() {
    MutexLock lock(mutex);
    open = true;
    opened.notify_all();
  }
};

}  // namespace

TEST(thread_states_tell_how_a_thread_waits) {
  if (!thread_states()) return;  // this kernel does not tell
  Gate gate;
  std::array<int, 2> ends{};
  CHECK_EQ(::pipe(ends.data()), 0);
  {
    const Thread until_woken("wait-woken", [&] { gate.wait(0s); });
    const Thread for_a_time("wait-time", [&] { gate.wait(600s); });
    const Thread reads("wait-reads", [&] {
      char byte = 0;
      CHECK_EQ(::read(ends[0], &byte, 1), 1);
    });
    CHECK(becomes("wait-woken", Sleep::kUntilWoken));
    CHECK(becomes("wait-time", Sleep::kForATime));
    CHECK(becomes("wait-reads", Sleep::kOther));
    const auto before = state_of("wait-woken");
    const auto after = state_of("wait-woken");
    CHECK(before && after && before->switches == after->switches);
    gate.pass();
    CHECK_EQ(::write(ends[1], "x", 1), 1);
  }
  CHECK(!state_of("wait-woken"));
  for (const int end : ends) (void)::close(end);
}
