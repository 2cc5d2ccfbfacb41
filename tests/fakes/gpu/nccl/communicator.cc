#include "nccl/communicator.h"

#include <cstdio>
#include <cstring>
#include <thread>

namespace fakegpu {
namespace {

using namespace std::chrono_literals;

struct LastError {
  hvdlite::Mutex mutex;
  std::string text HVDLITE_GUARDED_BY(mutex);
};

LastError& the_last_error() {
  static auto* error = new LastError;
  return *error;
}

// Worlds that some rank has yet to join, by the text of their ids.
struct Worlds {
  hvdlite::Mutex mutex;
  int made HVDLITE_GUARDED_BY(mutex) = 0;
  std::map<std::string, std::shared_ptr<World>> by_id HVDLITE_GUARDED_BY(mutex);
};

Worlds& worlds() {
  static auto* all = new Worlds;
  return *all;
}

std::shared_ptr<World> find_world(const ncclUniqueId& id) {
  hvdlite::MutexLock lock(worlds().mutex);
  const auto found = worlds().by_id.find(id.internal);
  return found == worlds().by_id.end() ? nullptr : found->second;
}

void forget_world(const ncclUniqueId& id) {
  hvdlite::MutexLock lock(worlds().mutex);
  worlds().by_id.erase(id.internal);
}

}  // namespace

ncclUniqueId make_world() {
  ncclUniqueId id{};
  hvdlite::MutexLock lock(worlds().mutex);
  std::snprintf(id.internal, sizeof id.internal, "fake %d", ++worlds().made);
  worlds().by_id[id.internal] = std::make_shared<World>();
  return id;
}

ncclResult_t fail(ncclResult_t code, const std::string& text) {
  hvdlite::MutexLock lock(the_last_error().mutex);
  the_last_error().text = text;
  return code;
}

std::string last_error() {
  hvdlite::MutexLock lock(the_last_error().mutex);
  return the_last_error().text;
}

std::string describe(const Descriptor& descriptor) {
  constexpr const char* kKinds[] = {"nothing",   "AllReduce",     "Broadcast", "Reduce",
                                    "AllGather", "ReduceScatter", "Send",      "Recv"};
  return std::string(kKinds[static_cast<int>(descriptor.kind)]) + " number " +
         std::to_string(descriptor.sequence) + " of " + std::to_string(descriptor.count) +
         " elements of type " + std::to_string(descriptor.dtype) + ", operation " +
         std::to_string(descriptor.op) + ", root " + std::to_string(descriptor.root);
}

Handles<Communicator>& communicators() {
  static auto* all = new Handles<Communicator>;
  return *all;
}

void Communicator::leave() {
  if (world_ == nullptr) return;
  hvdlite::MutexLock lock(world_->mutex);
  world_->members[rank].left = true;
  world_->changed.notify_all();
}

int Communicator::add_scale(double scale) {
  FAKE_NCCL_COUNT(*this, live_reduce_ops, 1);
  hvdlite::MutexLock lock(mutex_);
  scales_[next_op_] = scale;
  return next_op_++;
}

bool Communicator::remove_scale(int op) {
  hvdlite::MutexLock lock(mutex_);
  if (scales_.erase(op) == 0) return false;
  FAKE_NCCL_COUNT(*this, live_reduce_ops, -1);
  return true;
}

bool Communicator::find_scale(int op, double& scale) {
  hvdlite::MutexLock lock(mutex_);
  const auto found = scales_.find(op);
  if (found == scales_.end()) return false;
  scale = found->second;
  return true;
}

int Communicator::live_reduce_ops() {
  hvdlite::MutexLock lock(mutex_);
  return static_cast<int>(scales_.size());
}

void Communicator::set_error(ncclResult_t code, const std::string& text) {
  int none = ncclSuccess;
  if (error_.compare_exchange_strong(none, code)) fail(code, text);
}

void Communicator::fail_all(const std::string& text) {
  std::fprintf(stderr, "fake_nccl: %s\n", text.c_str());
  set_error(ncclInvalidUsage, text);
  hvdlite::MutexLock lock(world_->mutex);
  if (world_->failure.empty()) world_->failure = text;
  world_->changed.notify_all();
}

bool Communicator::await(const std::function<bool()>& ready) {
  hvdlite::MutexLock lock(world_->mutex);
  while (!ready()) {
    if (aborted_) {
      set_error(ncclRemoteError, "aborted");
    } else if (!world_->failure.empty()) {
      set_error(ncclInvalidUsage, world_->failure);
    } else {
      // Nobody is told of an abort.
      world_->changed.wait_until(world_->mutex, std::chrono::steady_clock::now() + 1ms);
      continue;
    }
    return false;
  }
  return true;
}

void Communicator::blame_if_lost(int peer) {
  if (!world_->members[peer].left || fake_option("FAKE_NCCL_SILENT_PEERS", device, 0) != 0) return;
  set_error(ncclRemoteError,
            "connection closed by remote peer: rank " + std::to_string(peer) + " is gone");
}

bool Communicator::meet(Meeting& meeting) {
  std::uint64_t number = 0;
  {
    hvdlite::MutexLock lock(world_->mutex);
    number = meeting.number;
    if (++meeting.arrived == size) {
      meeting.arrived = 0;
      ++meeting.number;
      world_->changed.notify_all();
    }
  }
  return await([&] {
    if (meeting.number != number) return true;
    for (int peer = 0; peer < size; ++peer) blame_if_lost(peer);
    return false;
  });
}

void Communicator::wait_for_work() const {
  while (running_ > 0 || in_progress_ > 0 || (!aborted_ && queued_ > 0)) {
    std::this_thread::sleep_for(100us);
  }
}

ncclResult_t Communicator::wait_until_flushed() {
  return await([&] { return queued_ == 0; }) ? ncclSuccess : error();
}

ncclResult_t Communicator::join(const ncclUniqueId& id) {
  const std::shared_ptr<World> world = find_world(id);
  if (world == nullptr) return fail(ncclRemoteError, "the unique id leads to no rank that listens");
  {
    hvdlite::MutexLock lock(world->mutex);
    if (world->members.empty()) world->members.resize(static_cast<std::size_t>(size));
    if (static_cast<int>(world->members.size()) != size || world->members[rank].device >= 0) {
      return fail(ncclInvalidUsage,
                  "the ranks name different numbers of ranks, or one joins twice");
    }
    world->members[rank].device = device;
  }
  world_ = world;
  if (!meet(world_->on_host)) return error();
  forget_world(id);
  return check_duplicates();
}

ncclResult_t Communicator::check_duplicates() {
  for (int i = 0; i < size; ++i) {
    if (i == rank || world_->members[i].device != device) continue;
    return fail(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(rank) +
                                      " and rank " + std::to_string(i) + " both on CUDA device " +
                                      std::to_string(device + 1) + "000");
  }
  return ncclSuccess;
}

}  // namespace fakegpu
