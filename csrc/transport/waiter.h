// How an engine sleeps, and how others wake it.
//
// A rank waits for very different things: flags in shared memory that a peer stores, bytes on a
// socket, work that a thread of its own enqueues, the death of a peer. All of them end the same
// sleep. The sleeper first spins on its condition (worth two orders of magnitude where a core is
// free), then publishes `sleeping`, looks once more, and sleeps in epoll on its own eventfd (the
// bell) and on the watched sockets. A thread that changes something that a rank may wait for rings
// that rank's Bell afterwards: one load while the rank is awake, one write(2) when it sleeps. Local
// peers hold a duplicate of the eventfd (passed over a Unix socket at bootstrap). There is no I/O
// thread and no polling: an idle process uses no processor time.
//
// Order: the waker stores its change, then loads `sleeping`; the sleeper stores `sleeping`, then
// loads the change. All four are seq_cst, so at least one of them sees the other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "os/fd.h"

namespace hvdlite {

// Makes an eventfd for a new Waiter; it is invalid when the system has none left (errno says why).
Fd make_bell();

// Rings one rank's Waiter. A view: the Fabric that hands it out owns the flag and the descriptor.
class Bell {
 public:
  Bell() = default;
  Bell(std::atomic<std::uint32_t>* sleeping, int event_fd)
      : sleeping_(sleeping), event_fd_(event_fd) {}
  // Any thread of any process that shares the flag may call this; it never blocks.
  void ring() const {
    if (sleeping_ != nullptr && sleeping_->load(std::memory_order_seq_cst) != 0) write_event();
  }

 private:
  void write_event() const;
  std::atomic<std::uint32_t>* sleeping_ = nullptr;
  int event_fd_ = -1;
};

// One rank's sleep. Its Fabric owns it, and the engine's runner uses it, except where a function
// says any thread.
class Waiter {
 public:
  // `sleeping` (borrowed) lies in memory that all ringers can see. `event_fd` is this rank's bell,
  // `spin` the time of a wait before it sleeps, `size` the world's. kInternal names a system call.
  static Result<std::unique_ptr<Waiter>> make(std::atomic<std::uint32_t>* sleeping, Fd event_fd,
                                              std::chrono::microseconds spin, int size);

  // Watches a socket, edge-triggered: any event on the socket ends a sleep, and its end of file or
  // hang-up makes `rank` lost. Data stays for the socket's reader (a liveness socket has none).
  Status watch(int fd, int rank);
  // True once a watched socket or flag of that rank has shown that the rank is gone. All that the
  // rank published before it went is then visible: look at your condition once more.
  bool lost(int rank) const;
  // Ends this wait, and every later one that is not ready at once, with kShutdown. Any thread.
  void interrupt() {
    interrupted_.store(true);
    bell().ring();
  }
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
    if (spin_until(ready)) return Status();
    while (true) {
      announce_sleep();
      if (meanwhile_) meanwhile_();
      if (ready()) return wake_up(Status());
      if (interrupted_.load()) {
        return wake_up(Status(StatusCode::kShutdown, "interrupted: this rank ends its world"));
      }
      if (Status status = failed(); !status.ok()) {
        (void)wake_up(Status());
        return ready() ? Status() : status;
      }
      if (deadline.passed()) return wake_up(Status(StatusCode::kTimeout, ""));
      if (Status status = sleep(deadline); !status.ok()) return wake_up(status);
      (void)wake_up(Status());
      if (ready()) return Status();
    }
  }

  // Wakes this waiter from any thread of this process.
  Bell bell() const;

 private:
  explicit Waiter(int size) : lost_(size), flags_(size) {}
  template <typename Ready>
  bool spin_until(Ready&& ready) {
    if (ready()) return true;
    if (spin_.count() <= 0) return false;
    const auto end = std::chrono::steady_clock::now() + spin_;
    while (std::chrono::steady_clock::now() < end) {
      if (meanwhile_) meanwhile_();
      for (int i = 0; i < kPollsPerClockRead; ++i) {
        if (ready()) return true;
        pause();
      }
    }
    return false;
  }
  static void pause();  // one spin-loop hint of the processor
  void announce_sleep();
  Status wake_up(Status status);  // withdraws the announcement and returns `status`
  Status sleep(Deadline deadline);

  void mark_lost(int rank);

  static constexpr int kPollsPerClockRead = 16;
  std::atomic<std::uint32_t>* sleeping_ = nullptr;
  Fd event_fd_;
  Fd epoll_fd_;
  std::chrono::microseconds spin_{0};
  std::atomic<bool> interrupted_{false};
  std::function<void()> meanwhile_;
  std::vector<std::atomic<bool>> lost_;                          // by rank
  std::vector<std::shared_ptr<const std::atomic<bool>>> flags_;  // by rank; may be null
};

}  // namespace hvdlite
