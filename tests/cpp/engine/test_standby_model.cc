// The turn, the waiter's flag and its event in all interleavings: from every state that threads can
// reach, they can still come to their end, and none of them sleeps for ever beside its work.
//
// A model of one rank, with the real Turn: the background, two callers that block, a thread that
// submits work nobody waits for, a peer, and one that closes the world. Each step is one access to
// what they share. The peer answers each entry of a caller by a frame, and sends frames of its own,
// as to a coordinator. Left out as always possible are the end of a grace and of a timed wait; but
// the sleep in epoll ends by an event alone.
#include <algorithm>
#include <array>
#include <deque>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "check.h"
#include "engine/runner_token.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

struct Program {
  int callers = 1;
  int calls = 1;        // of each
  int submits = 0;      // without a wait
  int frames = 0;       // of the peer's own
  bool closes = false;  // at any time
};

enum class At : signed char {
  // Any thread that is the runner.
  kRun,
  kPoll,
  kArm,
  kLookAtQueue,
  kLookAtFrames,
  kSleep,
  // A caller.
  kSubmit,
  kTry,
  kWithdraw,
  kGiveBack,
  kGiveBackQueue,
  kGiveBackFrames,
  kRelease,
  // The background.
  kTake,
  kAwaitRelease,
  kTaken,
  kStandBy,
  kResume,
  // Any thread that wakes others: looks at the flag, and sends.
  kWake,
  kLoad,
  kWakeUp,
  kEnd,
};

struct Thread {
  At at = At::kEnd;
  signed char left = 0;  // calls, submissions, frames
  bool found = false;    // in its last look
  bool armed = false;
};

constexpr int kBackground = 0;
constexpr int kSubmitter = 1;
constexpr int kPeer = 2;
constexpr int kCloser = 3;
constexpr int kFirstCaller = 4;
constexpr int kThreads = 6;

struct World {
  Turn turn;
  bool soon = false;  // a release lies within the grace
  bool requested = false;
  bool sleeping = false;
  bool event = false;  // an event that no sleeper has had
  bool ending = false;
  signed char queue_of_others = 0;     // entries without a caller
  signed char frames = 0;              // of the peer's own, not handled
  std::array<signed char, 2> entry{};  // by caller: 1 queued, 2 sent, 3 answered; 0: done
  std::array<Thread, kThreads> threads;

  bool queued() const { return queue_of_others > 0 || entry[0] == 1 || entry[1] == 1; }
  bool arrived() const { return frames > 0 || entry[0] == 3 || entry[1] == 3; }
};

static_assert(std::has_unique_object_representations_v<World>);
std::string_view bytes_of(const World& world) {
  return {reinterpret_cast<const char*>(&world), sizeof world};
}

class Steps {
 public:
  explicit Steps(const World& from) : from_(from) {}

  // What can come after one step of any thread.
  std::vector<World> all() {
    for (int i = 0; i < kThreads; ++i) {
      if (from_.threads[i].at != At::kEnd) step(i);
    }
    if (from_.soon) add([](World& world) { world.soon = false; });
    return std::move(next_);
  }

 private:
  template <typename Change>
  void add(const Change& change) {
    World world = from_;
    change(world);
    next_.push_back(world);
  }
  // The thread changes the world and goes on elsewhere.
  template <typename Change>
  void go(int i, const Change& change) {
    add([&](World& world) { world.threads[i].at = change(world, world.threads[i]); });
  }
  void go(int i, At at) {
    go(i, [at](World&, Thread&) { return at; });
  }

  void step(int i) {
    if (i == kSubmitter || i == kPeer || i == kCloser) return other(i);
    switch (from_.threads[i].at) {
      case At::kRun:
        return run(i);
      case At::kPoll:
        return poll(i);
      case At::kArm:
        return go(i, [&](World& world, Thread&) {
          world.sleeping = true;
          return At::kLookAtQueue;
        });
      case At::kLookAtQueue:
        return look(i, from_.queued() || from_.ending, At::kLookAtFrames);
      case At::kLookAtFrames:
        return look(i, from_.arrived() || (i == kBackground && from_.requested),
                    i == kBackground ? At::kStandBy : At::kSleep);
      case At::kSleep:
        return sleep(i);
      default:
        return i == kBackground ? background() : caller(i);
    }
  }

  // The runner takes its queue, and then what has arrived.
  void run(int i) {
    if (i != kBackground && (done(i) || from_.ending)) return go(i, At::kGiveBack);
    if (i == kBackground && (from_.ending || from_.requested)) return go(i, At::kRelease);
    go(i, [](World& world, Thread& self) {
      self.found = world.queued();
      world.queue_of_others = 0;
      for (signed char& entry : world.entry) entry = entry == 1 ? 2 : entry;
      return At::kPoll;
    });
  }
  void poll(int i) {
    go(i, [](World& world, Thread& self) {
      const bool found = std::exchange(self.found, false) || world.arrived();
      world.frames = 0;
      for (signed char& entry : world.entry) entry = entry == 3 ? 0 : entry;
      return found ? At::kRun : At::kArm;
    });
  }
  void look(int i, bool ready, At otherwise) {
    go(i, [&](World& world, Thread&) {
      if (!ready) return otherwise;
      world.sleeping = false;
      return At::kRun;
    });
  }
  // In epoll, as the runner or standing by: one event wakes one sleeper.
  void sleep(int i) {
    if (!from_.event) return;
    go(i, [&](World& world, Thread&) {
      world.event = false;
      if (i == kBackground) return At::kResume;
      world.sleeping = false;
      return At::kRun;
    });
  }

  void background() {
    constexpr int i = kBackground;
    switch (from_.threads[i].at) {
      case At::kTake:
        if (from_.turn.held) {
          return go(i, [](World& world, Thread&) {
            world.turn.awaits_release = true;
            return At::kAwaitRelease;
          });
        }
        return go(i, [](World& world, Thread&) {
          return world.turn.try_take_background(world.soon) ? At::kTaken : At::kTake;
        });
      case At::kAwaitRelease:
        if (from_.turn.held) return;
        return go(i, [](World& world, Thread&) {
          world.turn.awaits_release = false;
          return At::kTake;
        });
      case At::kTaken:
        return go(i, [](World& world, Thread& self) {
          world.requested = world.sleeping = false;
          if (!world.turn.closed) return At::kRun;
          world.entry = {};  // the end of the world: all that waits fails
          world.queue_of_others = world.frames = 0;
          self.left = 0;
          return At::kEnd;
        });
      case At::kRelease:
        return release(i, /*work_left=*/from_.ending, /*armed=*/false, At::kTake);
      case At::kStandBy:
        return go(i, [](World& world, Thread&) {
          world.turn.stand_by();
          return At::kSleep;
        });
      case At::kResume:
        return go(i, [&](World& world, Thread&) {
          if (!world.turn.resume()) return At::kLoad;
          world.requested = world.sleeping = false;
          return At::kRun;
        });
      case At::kLoad:
        return go(i, from_.sleeping ? At::kWakeUp : At::kTake);
      case At::kWakeUp:
        return send(i, At::kTake);
      default:
        CHECK(false);
    }
  }

  void caller(int i) {
    const Thread& self = from_.threads[i];
    switch (self.at) {
      case At::kSubmit:
        if (self.left == 0 || from_.ending) return go(i, At::kEnd);
        return go(i, [&](World& world, Thread& self) {
          --self.left;
          world.entry[i - kFirstCaller] = 1;
          return At::kTry;
        });
      case At::kTry:
        if (done(i)) return go(i, At::kSubmit);
        if (from_.turn.held && !from_.requested && !from_.ending) {
          return add([](World& world) { world.requested = true; });
        }
        if (from_.turn.held || from_.turn.closed) return;
        return go(i, [](World& world, Thread&) {
          world.turn.try_take(world.soon);
          world.requested = false;
          return At::kWithdraw;
        });
      case At::kWithdraw:
        return go(i, [](World& world, Thread&) {
          world.sleeping = false;
          return At::kRun;
        });
      case At::kGiveBack:
        return go(i, [&](World& world, Thread& self) {
          self.armed = world.turn.may_stand_by();
          if (!self.armed) return At::kRelease;
          world.sleeping = true;
          return At::kGiveBackQueue;
        });
      case At::kGiveBackQueue:
        return look_back(i, from_.queued() || from_.ending, At::kGiveBackFrames);
      case At::kGiveBackFrames:
        return look_back(i, from_.arrived(), At::kRelease);
      case At::kRelease: {
        const bool pending = from_.entry[0] == 2 || from_.entry[1] == 2;
        return release(i, !self.armed && (pending || from_.queued()), self.armed, At::kSubmit);
      }
      case At::kWakeUp:
        return send(i, At::kSubmit);
      default:
        CHECK(false);
    }
  }
  void look_back(int i, bool ready, At otherwise) {
    go(i, [&](World& world, Thread& self) {
      if (!ready) return otherwise;
      world.sleeping = self.armed = false;
      return At::kRelease;
    });
  }
  void release(int i, bool work_left, bool armed, At then) {
    go(i, [&](World& world, Thread& self) {
      self.armed = false;
      world.soon = true;
      return world.turn.release(work_left, armed) ? At::kWakeUp : then;
    });
  }
  void send(int i, At then) {
    go(i, [&](World& world, Thread&) {
      world.event = true;
      return then;
    });
  }

  // Those that only bring work: they store it, wake the background, and send where that is asked.
  void other(int i) {
    switch (from_.threads[i].at) {
      case At::kSubmit:
        return bring(i);
      case At::kWake:
        return go(i, [&](World& world, Thread&) {
          if (i == kSubmitter) world.turn.wake();
          if (i == kCloser) world.turn.closed = true;
          if (i == kCloser) world.requested = false;
          return At::kLoad;
        });
      case At::kLoad:
        return go(i, from_.sleeping ? At::kWakeUp : At::kSubmit);
      default:
        return send(i, At::kSubmit);
    }
  }
  void bring(int i) {
    if (i == kPeer) {
      for (int caller = 0; caller < 2; ++caller) {
        if (from_.entry[caller] != 2) continue;
        go(i, [&](World& world, Thread&) {
          world.entry[caller] = 3;
          return At::kLoad;
        });
      }
    }
    if (from_.threads[i].left == 0) return i == kPeer ? void() : go(i, At::kEnd);
    go(i, [&](World& world, Thread& self) {
      --self.left;
      if (i == kPeer) ++world.frames;
      if (i == kSubmitter && !world.ending) ++world.queue_of_others;
      if (i == kCloser) world.ending = true;
      return i == kPeer ? At::kLoad : At::kWake;
    });
  }

  bool done(int i) const { return from_.entry[i - kFirstCaller] == 0; }

  const World& from_;
  std::vector<World> next_;
};

World beginning(const Program& program) {
  World world;
  const auto begin = [&](int i, At at, int left) {
    world.threads[i] = {.at = at, .left = static_cast<signed char>(left)};
  };
  begin(kBackground, At::kTake, 0);
  begin(kSubmitter, At::kSubmit, program.submits);
  begin(kPeer, At::kSubmit, program.frames);
  begin(kCloser, At::kSubmit, program.closes ? 1 : 0);
  for (int i = 0; i < program.callers; ++i) begin(kFirstCaller + i, At::kSubmit, program.calls);
  return world;
}

bool at_its_end(const World& world) {
  for (int i = kFirstCaller; i < kThreads; ++i) {
    if (world.threads[i].at != At::kEnd) return false;
  }
  const bool brought = world.threads[kSubmitter].at == At::kEnd &&
                       world.threads[kCloser].at == At::kEnd && world.threads[kPeer].left == 0;
  if (!brought) return false;
  if (world.ending) return world.threads[kBackground].at == At::kEnd;
  return !world.queued() && !world.arrived();
}

struct Found {
  std::size_t states = 0;
  std::size_t lost = 0;  // states from which no end can be reached
};

// Follows all interleavings, and then the ends backwards.
Found explore(const Program& program) {
  std::unordered_map<std::string_view, int> number;
  std::deque<World> worlds;
  std::deque<std::vector<int>> before;
  const auto id_of = [&](const World& world) {
    const auto found = number.find(bytes_of(world));
    if (found != number.end()) return found->second;
    worlds.push_back(world);
    before.emplace_back();
    return number[bytes_of(worlds.back())] = static_cast<int>(worlds.size()) - 1;
  };
  id_of(beginning(program));
  for (std::size_t i = 0; i < worlds.size(); ++i) {
    for (const World& next : Steps(worlds[i]).all()) {
      before[id_of(next)].push_back(static_cast<int>(i));
    }
  }
  std::vector<bool> ends(worlds.size());
  std::vector<int> open;
  const auto mark = [&](int i) {
    if (!ends[i]) open.push_back(i);
    ends[i] = true;
  };
  for (std::size_t i = 0; i < worlds.size(); ++i) {
    if (at_its_end(worlds[i])) mark(static_cast<int>(i));
  }
  while (!open.empty()) {
    const int i = open.back();
    open.pop_back();
    for (const int earlier : before[i]) mark(earlier);
  }
  return {worlds.size(), static_cast<std::size_t>(std::count(ends.begin(), ends.end(), false))};
}

}  // namespace

TEST(no_wake_up_is_lost_while_the_background_stands_by) {
  for (const Program& program : {
           Program{.callers = 1, .calls = 2, .frames = 1},
           Program{.callers = 1, .calls = 1, .submits = 1},
           Program{.callers = 2, .calls = 1},
           Program{.callers = 1, .calls = 1, .frames = 1, .closes = true},
       }) {
    const Found found = explore(program);
    CHECK(found.states > 10'000);
    CHECK_EQ(found.lost, std::size_t{0});
  }
}
