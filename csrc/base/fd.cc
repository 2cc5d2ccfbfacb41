#include "base/fd.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>

namespace hvdlite {
namespace {

constexpr std::size_t kRegistered = 4096;

// Process-wide because fork() is: the child's handler has nothing else to go by, and may call only
// what is async-signal-safe. A cell holds a descriptor + 1; 0 is free.
std::array<std::atomic<int>, kRegistered> g_registered{};
std::atomic<pid_t> g_forking{0};      // the process that called fork() last
std::atomic<pid_t> g_forked_from{0};  // in a child of a process with a world: that process

void remember_parent() { g_forking.store(::getpid()); }

void close_in_child() {
  for (std::atomic<int>& cell : g_registered) {
    if (const int fd = cell.exchange(0); fd > 0) {
      ::close(fd - 1);
      g_forked_from.store(g_forking.load());
    }
  }
}

void install_once() {
  static const int kInstalled = ::pthread_atfork(&remember_parent, nullptr, &close_in_child);
  (void)kInstalled;
}

}  // namespace

void Fd::reset() {
  if (fd_ < 0) return;
  forget_in_forked_child(fd_);
  ::close(fd_);
  fd_ = -1;
}

void close_in_forked_child(int fd) {
  install_once();
  for (std::atomic<int>& cell : g_registered) {
    int free = 0;
    if (cell.compare_exchange_strong(free, fd + 1)) return;
  }
}

void forget_in_forked_child(int fd) {
  for (std::atomic<int>& cell : g_registered) {
    int held = fd + 1;
    if (cell.compare_exchange_strong(held, 0)) return;
  }
}

Status check_not_forked() {
  const pid_t parent = g_forked_from.load();
  if (parent == 0) return Status();
  return Status(StatusCode::kForked,
                "hvdlite is not usable after fork() (pid " + std::to_string(parent) + " -> " +
                    std::to_string(::getpid()) +
                    "): this process is a child of a rank; start it with the spawn method, or keep "
                    "collectives in the parent");
}

}  // namespace hvdlite
