#include "nccl/communicator.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

namespace fakegpu {
namespace {

struct LastError {
  hvdlite::Mutex mutex;
  std::string text HVDLITE_GUARDED_BY(mutex);
};

LastError& the_last_error() {
  static auto* error = new LastError;
  return *error;
}

std::uint64_t host_of_this_process() {
  const char* id = std::getenv("NCCL_HOSTID");
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return std::hash<std::string>{}(id != nullptr ? id : name);
}

// Also true of a process whose parent has not waited for it yet.
bool has_ended(int pid) {
  if (pid == 0 || pid == ::getpid()) return false;
  const int fd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0) return errno == ESRCH;
  pollfd end{fd, POLLIN, 0};
  const bool ended = ::poll(&end, 1, 0) > 0;
  ::close(fd);
  return ended;
}

}  // namespace

ncclResult_t fail(ncclResult_t code, const std::string& text) {
  hvdlite::MutexLock lock(the_last_error().mutex);
  the_last_error().text = text;
  return code;
}

std::string last_error() {
  hvdlite::MutexLock lock(the_last_error().mutex);
  return the_last_error().text;
}

Handles<Communicator>& communicators() {
  static auto* all = new Handles<Communicator>;
  return *all;
}

Communicator::~Communicator() {
  if (file_ != nullptr) close_file(file_);
}

void Communicator::leave() {
  if (file_ != nullptr) file_->members[rank_].left = 1;
}

int Communicator::add_scale(std::uint64_t bits) {
  FAKE_NCCL_COUNT(*this, live_reduce_ops, 1);
  hvdlite::MutexLock lock(mutex_);
  scales_[next_op_] = bits;
  return next_op_++;
}

bool Communicator::remove_scale(int op) {
  hvdlite::MutexLock lock(mutex_);
  if (scales_.erase(op) == 0) return false;
  FAKE_NCCL_COUNT(*this, live_reduce_ops, -1);
  return true;
}

bool Communicator::find_scale(int op, std::uint64_t& bits) {
  hvdlite::MutexLock lock(mutex_);
  const auto found = scales_.find(op);
  if (found == scales_.end()) return false;
  bits = found->second;
  return true;
}

int Communicator::live_reduce_ops() {
  hvdlite::MutexLock lock(mutex_);
  return static_cast<int>(scales_.size());
}

ncclResult_t Communicator::state() const { return in_progress_ > 0 ? ncclInProgress : error(); }

void Communicator::set_error(ncclResult_t code, const std::string& text) {
  int none = ncclSuccess;
  if (error_.compare_exchange_strong(none, code)) fail(code, text);
}

void Communicator::fail_all(const std::string& text) {
  if (file_->failed.exchange(1) == 0) {
    std::snprintf(file_->failure, sizeof file_->failure, "%s", text.c_str());
    std::fprintf(stderr, "fake_nccl: %s\n", text.c_str());
    file_->failure_written = 1;
  }
  while (file_->failure_written == 0) std::this_thread::yield();
  set_error(ncclInvalidUsage, file_->failure);
}

std::chrono::steady_clock::time_point Communicator::deadline() const {
  return std::chrono::steady_clock::now() +
         std::chrono::milliseconds(fake_option("FAKE_NCCL_TIMEOUT_MS", device, 30000));
}

bool Communicator::is_lost(int peer) const {
  if (fake_option("FAKE_NCCL_SILENT_PEERS", device, 0) != 0) return false;
  const Member& member = file_->members[peer];
  return member.left != 0 || has_ended(member.pid);
}

bool Communicator::keep_waiting(std::chrono::steady_clock::time_point deadline) {
  if (aborted_) {
    set_error(ncclRemoteError, "aborted");
    return false;
  }
  if (file_->failed != 0) {
    fail_all("");
    return false;
  }
  if (std::chrono::steady_clock::now() > deadline) {
    const std::string text = "rank " + std::to_string(rank_) + " waits too long in " +
                             describe(file_->members[rank_].current);
    std::fprintf(stderr, "fake_nccl: %s\n", text.c_str());
    set_error(ncclSystemError, text);
    return false;
  }
  return true;
}

bool Communicator::meet(SharedBarrier& barrier) {
  const auto until = deadline();
  const std::uint32_t generation = barrier.generation;
  if (barrier.arrived.fetch_add(1) + 1 == static_cast<std::uint32_t>(size_)) {
    barrier.arrived = 0;
    ++barrier.generation;
    futex_wake(barrier.generation);
    return true;
  }
  while (true) {
    // Asked first: a rank that has left by now may have arrived before it left.
    int lost = 0;
    while (lost < size_ && !is_lost(lost)) ++lost;
    if (barrier.generation != generation) return true;
    if (lost < size_) {
      set_error(ncclRemoteError,
                "connection closed by remote peer: rank " + std::to_string(lost) + " is gone");
    }
    if (!keep_waiting(until)) return false;
    futex_wait(barrier.generation, generation);
  }
}

void Communicator::wait_for_work() const {
  const auto until = deadline();
  while (running_ > 0 || in_progress_ > 0 || (!aborted_ && queued_ > 0)) {
    if (std::chrono::steady_clock::now() > until) {
      std::fprintf(stderr, "fake_nccl: rank %d destroys a communicator at work\n", rank());
      std::abort();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

ncclResult_t Communicator::wait_until_flushed() {
  const auto until = deadline();
  while (queued_ > 0) {
    if (!keep_waiting(until)) return error();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return ncclSuccess;
}

ncclResult_t Communicator::join(const ncclUniqueId& id) {
  SharedFile* file = open_file(id);
  if (file == nullptr) return fail(ncclRemoteError, "the unique id leads to no rank that listens");
  file_ = file;
  int expected = 0;
  if (!file->size.compare_exchange_strong(expected, size()) && expected != size()) {
    return fail(ncclInvalidUsage, "the ranks name different numbers of ranks");
  }
  Member& self = file->members[rank_];
  self.device = fake_physical_device(device);
  self.host = host_of_this_process();
  expected = 0;
  if (!self.pid.compare_exchange_strong(expected, ::getpid())) {
    return fail(ncclInvalidUsage, "rank " + std::to_string(rank_) + " joins twice");
  }
  if (!meet(file->on_host)) return error();
  forget_file(id);
  return check_duplicates();
}

ncclResult_t Communicator::check_duplicates() {
  for (int i = 0; i < size_; ++i) {
    const Member& other = file_->members[i];
    const Member& self = file_->members[rank_];
    if (i == rank_ || other.device != self.device || other.host != self.host) continue;
    return fail(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(rank_) +
                                      " and rank " + std::to_string(i) + " both on CUDA device " +
                                      std::to_string(self.device + 1) + "000");
  }
  return ncclSuccess;
}

}  // namespace fakegpu
