#include "transport/waiter.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <thread>
#include <utility>

#include "base/cpu.h"

namespace hvdlite {
namespace {

constexpr std::uint64_t kWakeUpTag = UINT64_MAX;
constexpr int kEventsAtOnce = 16;

}  // namespace

void WakeUp::write_event() const {
  const std::uint64_t one = 1;
  // A full counter means that the sleeper has been rung already.
  [[maybe_unused]] const ssize_t written = ::write(event_fd_, &one, sizeof one);
}

Result<std::unique_ptr<Waiter>> Waiter::make(std::atomic<std::uint32_t>* sleeping, Fd event_fd,
                                             AwakeTimes awake, int size) {
  std::unique_ptr<Waiter> waiter(new Waiter(size));
  waiter->sleeping_ = sleeping;
  waiter->event_fd_ = std::move(event_fd);
  waiter->awake_ = awake;
  waiter->epoll_fd_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!waiter->epoll_fd_.valid()) return system_error("epoll_create1", errno);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = kWakeUpTag;
  if (::epoll_ctl(waiter->epoll_fd_.get(), EPOLL_CTL_ADD, waiter->event_fd_.get(), &event) != 0) {
    return system_error("epoll_ctl of the eventfd", errno);
  }
  return waiter;
}

Status Waiter::watch(int fd, int rank) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = static_cast<std::uint64_t>(rank);
  if (::epoll_ctl(epoll_fd_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return system_error("epoll_ctl of a peer's socket", errno);
  }
  return Status();
}

bool Waiter::lost(int rank) const {
  return lost_[rank].load() || (flags_[rank] != nullptr && flags_[rank]->load());
}

void Waiter::mark_lost(int rank) { lost_[rank].store(true); }

WakeUp Waiter::wake_up() const { return WakeUp(sleeping_, event_fd_.get()); }

void Waiter::pause() { cpu_pause(); }

void Waiter::yield() { std::this_thread::yield(); }

void Waiter::arm() { sleeping_->store(1, std::memory_order_seq_cst); }

void Waiter::disarm() {
  if (sleeping_->load(std::memory_order_relaxed) != 0) {
    sleeping_->store(0, std::memory_order_seq_cst);
  }
}

Status Waiter::disarmed(Status status) {
  disarm();
  return status;
}

void Waiter::wake_sleeper() const { wake_up().write_event(); }

Status Waiter::sleep(Deadline deadline) {
  std::array<epoll_event, kEventsAtOnce> events;
  const int count =
      ::epoll_wait(epoll_fd_.get(), events.data(), kEventsAtOnce, deadline.remaining_ms());
  if (count < 0 && errno != EINTR) return system_error("epoll_wait", errno);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == kWakeUpTag) {
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = ::read(event_fd_.get(), &count, sizeof count);
    } else if ((events[i].events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0) {
      mark_lost(static_cast<int>(events[i].data.u64));
    }
  }
  return Status();
}

}  // namespace hvdlite
