// The end of one collective: the only way from the engine to the threads that wait for it.
//
// The entry owns its completion, and threads that wait keep the entry alive. The runner finishes it
// once; any number of threads wait. What an allgather, an alltoall or a reducescatter received
// travels out with it. Neither side ever holds the other's lock here: the continuation that then()
// was given runs after the lock is released.
//
// An operation on GPU tensors is done when all of it has been given to the device. Its results may
// be used after `on_device`, and its tensors' memory may be freed then.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "base/status.h"
#include "gpu/device_memory_pool.h"

namespace hvdlite {

class Completion {
 public:
  // A result whose size the submitter did not know. It has neither `data` nor `device` where it
  // lies in the memory that the submitter gave, or was taken.
  struct Output {
    std::unique_ptr<std::byte[]> data;  // allocated by the engine
    std::size_t bytes = 0;
    DeviceMemory device;  // instead of `data`, for a GPU tensor; goes back to:
    std::shared_ptr<DeviceMemoryPool> pool;
  };

  bool done() const { return done_.load(std::memory_order_acquire); }
  // False when the deadline passed first.
  bool wait_until(Deadline deadline) {
    MutexLock lock(mutex_);
    while (!done()) {
      if (deadline.is_never()) {
        changed_.wait(mutex_);
      } else if (deadline.passed()) {
        return false;
      } else {
        changed_.wait_until(mutex_, deadline.when());
      }
    }
    return true;
  }
  // Before the entry is submitted, once: `continuation` runs when the operation has ended, on the
  // thread that ended it. It must not block, and may submit.
  void then(std::function<void()> continuation) { then_ = std::move(continuation); }
  // As then(), for an entry without a continuation that may be under way. False when it is done:
  // then `continuation` never runs. Any thread.
  bool then_unless_done(std::function<void()> continuation) {
    MutexLock lock(mutex_);
    if (done()) return false;
    then_ = std::move(continuation);
    return true;
  }
  // Whether something is to happen when the operation ends, besides the end of waits. Any thread.
  bool has_continuation() {
    MutexLock lock(mutex_);
    return then_ != nullptr;
  }
  // Returns the continuation for a caller that runs it later than finish() would.
  std::function<void()> take_continuation() {
    MutexLock lock(mutex_);
    return std::exchange(then_, nullptr);
  }
  // Once: by the runner, or by the pending operations between two worlds.
  void finish(Status status) {
    std::function<void()> then;
    {
      MutexLock lock(mutex_);
      status_ = std::move(status.ok() ? misfit : status);
      done_.store(true, std::memory_order_release);
      changed_.notify_all();
      then = std::exchange(then_, nullptr);
    }
    if (then) then();
  }

  // The members from here on are read after done() only: they need no lock, because nothing changes
  // any more.
  const Status& status() const { return status_; }
  // What was received, written before finish(). The first dimensions say of which rows an output is
  // made: of an allgather tensor by tensor, of an alltoall, those from each member by position in
  // the process set; of a reducescatter those of this rank, by tensor.
  std::vector<std::int64_t> first_dimensions;
  int epoch = 0;                // elastic jobs: that of the world in which the result was made
  int set_id = -1;              // kAddProcessSet: the id of the new set
  int last_joined = -1;         // kJoin: the last rank to join
  std::vector<Output> outputs;  // Each tensor has one.
  // The status of a collective that went well, on this rank: an error where a result did not fit
  // the memory that the submitter gave. Written before finish(), which moves it.
  Status misfit;
  int members = 0;  // what an average divides by: those of the process set that had not joined, or
                    // all, as HVDLITE_AVERAGE_OVER_JOINED says
  CudaEventPtr on_device;  // It is null without GPU tensors. finish() comes after it.
  // Forgets what was received, before the entry is submitted anew. Not after finish().
  void clear_results();
  // Copies output i, once, to memory on its device, and gives the room back: on the host at once,
  // on a GPU as work of `stream`, which waits for `on_device` already. Any one thread, after done()
  // or from the continuation.
  Status copy_output(std::size_t i, void* target, CudaStream stream);
  // True once nothing touches the operation's memory any more.
  bool released() const { return done() && (on_device == nullptr || on_device->reached()); }

 private:
  std::atomic<bool> done_{false};  // set under mutex_
  Status status_;                  // written under mutex_, before done_
  std::function<void()> then_;     // written before the entry is submitted, or under mutex_

  Mutex mutex_;
  Condition changed_;
};

}  // namespace hvdlite
