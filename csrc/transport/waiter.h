// How an engine sleeps, and how others wake it.
//
// A rank waits for very different things: flags in shared memory that a peer stores, bytes on a
// socket, work that a thread of its own enqueues, the death of a peer. All of them end the same
// sleep. The sleeper first spins on its condition (worth two orders of magnitude where a core is
// free, and see SpinRecord), then lets others have the core between two looks (see YieldRecord),
// then publishes `sleeping` (it *arms* itself), looks once more, and sleeps in epoll on its own
// eventfd and on the watched sockets. A thread that changes something that a rank may wait for
// sends that rank a WakeUp afterwards: one load while the rank is awake, one write(2) when it
// sleeps. Local peers hold a duplicate of the eventfd (passed over a Unix socket at the start).
// There is no I/O thread and no polling: an idle process uses no processor time.
//
// Order: the waker stores its change, then loads `sleeping`; the sleeper stores `sleeping`, then
// loads the change. All four are seq_cst, so at least one of them sees the other.
//
// A thread that has nothing to do may sleep without being the runner any more (stand_by): then two
// threads can be in epoll, and one event wakes one of them. The one that is not the runner wakes
// the other, and does not sleep here again before it is the runner.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/status.h"

namespace hvdlite {

// Ends the sleep of one rank's Waiter. A view: the Fabric that hands it out owns the flag and the
// descriptor.
class WakeUp {
 public:
  WakeUp() = default;
  WakeUp(std::atomic<std::uint32_t>* sleeping, int event_fd)
      : sleeping_(sleeping), event_fd_(event_fd) {}
  // Any thread of any process that shares the flag may call this; it never blocks.
  void send() const {
    if (sleeping_ != nullptr && sleeping_->load(std::memory_order_seq_cst) != 0) write_event();
  }

 private:
  friend class Waiter;
  void write_event() const;
  std::atomic<std::uint32_t>* sleeping_ = nullptr;
  int event_fd_ = -1;
};

// Whether spins have paid lately. Where other processes want the same cores, a spin keeps a peer
// from running, and a sleep at once is faster: a wait then spins only now and then, to see whether
// that has changed. A spin pays if the condition came while it lasted. It was wasted if the
// condition came soon afterwards: where a peer comes much later, a spin costs little either way.
class SpinRecord {
 public:
  // Whether the next wait shall spin.
  bool pays() { return credit_ > kMost / 2 || ++skipped_ % kProbeInterval == 0; }
  void paid() { credit_ = std::min(credit_ + 1, kMost); }
  void wasted() { credit_ = std::max(credit_ - 1, 0); }

 private:
  static constexpr int kMost = 8;
  static constexpr std::uint32_t kProbeInterval = 8;  // in waits

  int credit_ = kMost;
  std::uint32_t skipped_ = 0;
};

// Whether it pays to give the core away between two looks instead of sleeping. Where ranks take
// turns on a core, a look costs one switch, and a sleep two and a system call on each side. But
// where something computes on that core, it keeps the core for its whole slice of time, and only a
// sleep would make the kernel give this thread the core as soon as it is woken.
class YieldRecord {
 public:
  // Whether the next wait shall yield.
  bool pays() {
    if (skips_ == 0) return true;
    --skips_;
    return false;
  }
  // Forgets slowly: in a training step, what computes comes and goes.
  void paid() { penalty_ -= (penalty_ + 7) / 8; }
  // The condition came soon after the end of the yields.
  void wasted() { skip(kMostWasted); }
  // The core came back long after it was given away.
  void dear() { skip(kMostDear); }

 private:
  static constexpr int kMostWasted = 64;  // in waits
  static constexpr int kMostDear = 4096;

  void skip(int most) {
    penalty_ = std::max(penalty_, std::min(2 * penalty_ + 4, most));
    skips_ = penalty_;
  }

  int penalty_ = 0;
  int skips_ = 0;
};

// How long a wait spins, and then yields, before it sleeps.
struct AwakeTimes {
  std::chrono::microseconds spin{0};
  std::chrono::microseconds yield{0};
};

// One rank's sleep. Its Fabric owns it, and the engine's runner uses it, except where a function
// says any thread.
class Waiter {
 public:
  // `sleeping` (borrowed) lies in memory that all who wake this rank can see. `event_fd` is this
  // rank's own, `size` the world's. kInternal names a system call.
  static Result<std::unique_ptr<Waiter>> make(std::atomic<std::uint32_t>* sleeping, Fd event_fd,
                                              AwakeTimes awake, int size);

  // Watches a socket, edge-triggered: any event on the socket ends a sleep, and its end of file or
  // hang-up makes `rank` lost. Data stays for the socket's reader (a liveness socket has none).
  Status watch(int fd, int rank);
  // True once a watched socket or flag of that rank has shown that the rank is gone. All that the
  // rank published before it went is then visible: look at your condition once more.
  bool lost(int rank) const;
  // Ends this wait, and every later one that is not ready at once, with kShutdown. Any thread.
  void interrupt() {
    interrupted_.store(true);
    wake_up().send();
  }
  // From here on waits spin also where that does not pay.
  void always_spin() { always_spins_ = true; }
  // For peers without a socket (threads as ranks): `gone` says when the rank is lost.
  void watch_flag(std::shared_ptr<const std::atomic<bool>> gone, int rank) {
    flags_[rank] = std::move(gone);
  }

  // Sets the work that the runner also does while it waits in a collective; null: none. wait()
  // calls it on its own thread, at its start and again and again while it spins and before it
  // sleeps. `meanwhile` must neither wait nor block.
  void set_meanwhile(std::function<void()> meanwhile) { meanwhile_ = std::move(meanwhile); }

  // Returns OK as soon as ready() holds. After each wake-up it calls failed(), and returns that
  // Status if it is not OK. At the deadline it returns kTimeout (with an empty message: the caller
  // knows what it has awaited). ready() is asked before failed(). One thread at a time.
  template <typename Ready, typename Failed>
  Status wait(Ready&& ready, Failed&& failed, Deadline deadline) {
    if (meanwhile_) meanwhile_();
    if (ready()) return Status();
    const bool spins = shall_spin();
    if (spins && spin_until(ready)) return Status();
    const bool yields = awake_.yield.count() > 0 && yield_record_.pays();
    if (yields && yield_until(ready)) return Status();
    const auto soon = std::chrono::steady_clock::now() + kSoon;
    while (true) {
      arm();
      if (meanwhile_) meanwhile_();
      if (ready()) return disarmed(Status());
      if (interrupted_.load()) {
        return disarmed(Status(StatusCode::kShutdown, "interrupted: this rank ends its world"));
      }
      if (Status status = failed(); !status.ok()) {
        (void)disarmed(Status());
        return ready() ? Status() : status;
      }
      if (deadline.passed()) return disarmed(Status(StatusCode::kTimeout, ""));
      if (Status status = sleep(deadline); !status.ok()) return disarmed(status);
      (void)disarmed(Status());
      if (!ready()) continue;
      if ((spins || yields) && std::chrono::steady_clock::now() < soon) {
        if (spins) spin_record_.wasted();
        if (yields) yield_record_.wasted();
      }
      return Status();
    }
  }

  // The runner's sleep without work, in which others may become the runner. If ready() does not
  // hold, and does not come to hold in a spin (where `awaits`: something is expected), this arms
  // the waiter, looks once more, calls give_away() and sleeps until an event or the deadline.
  // False: it has neither slept nor called give_away(). After true the caller may not be the
  // runner.
  template <typename Ready, typename GiveAway>
  bool stand_by(Ready&& ready, GiveAway&& give_away, bool awaits, Deadline deadline) {
    if (ready() || (awaits && shall_spin() && spin_until(ready))) return false;
    arm();
    if (ready() || interrupted_.load() || deadline.passed()) {
      disarm();
      return false;
    }
    give_away();
    (void)sleep(deadline);
    return true;
  }
  // For a thread that stands by: from here on each WakeUp is sent. The runner then looks once more
  // at all that may have changed, and is the runner no more, or disarms.
  void arm();
  void disarm();
  // Ends the sleep of a thread that stands by, armed or not. Any thread.
  void wake_sleeper() const;

  // Wakes this waiter from any thread of this process.
  WakeUp wake_up() const;

 private:
  explicit Waiter(int size) : lost_(size), flags_(size) {}
  bool shall_spin() { return awake_.spin.count() > 0 && (always_spins_ || spin_record_.pays()); }
  template <typename Ready>
  bool spin_until(Ready&& ready) {
    const auto end = std::chrono::steady_clock::now() + awake_.spin;
    while (std::chrono::steady_clock::now() < end) {
      if (meanwhile_) meanwhile_();
      for (int i = 0; i < kPollsPerClockRead; ++i) {
        if (ready()) {
          spin_record_.paid();
          return true;
        }
        pause();
      }
    }
    return false;
  }
  template <typename Ready>
  bool yield_until(Ready&& ready) {
    auto now = std::chrono::steady_clock::now();
    const auto end = now + awake_.yield;
    bool came = false;
    while (!came && now < end) {
      yield();
      if (meanwhile_) meanwhile_();
      came = ready();
      now = std::chrono::steady_clock::now();
    }
    if (now > end + kLongestTurn) {
      yield_record_.dear();
    } else if (came) {
      yield_record_.paid();
    }
    return came;
  }
  static void pause();  // one spin-loop hint of the processor
  static void yield();
  Status disarmed(Status status);  // disarms, and returns `status`
  Status sleep(Deadline deadline);

  void mark_lost(int rank);

  static constexpr int kPollsPerClockRead = 16;
  static constexpr auto kSoon = std::chrono::milliseconds(1);
  // What the ranks of a host take for their turns on a core; others compute for longer.
  static constexpr auto kLongestTurn = std::chrono::microseconds(200);
  std::atomic<std::uint32_t>* sleeping_ = nullptr;
  Fd event_fd_;
  Fd epoll_fd_;
  AwakeTimes awake_;
  bool always_spins_ = false;
  SpinRecord spin_record_;
  YieldRecord yield_record_;
  std::atomic<bool> interrupted_{false};
  std::function<void()> meanwhile_;
  std::vector<std::atomic<bool>> lost_;                          // Each rank has one.
  std::vector<std::shared_ptr<const std::atomic<bool>>> flags_;  // Each rank has one, or null.
};

}  // namespace hvdlite
