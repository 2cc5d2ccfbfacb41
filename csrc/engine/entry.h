// The record that travels through the engine: one collective as this rank submitted it.
//
// The submitter and the engine share it. The submitter fills it in by an EntryBuilder and then only
// reads; from Engine::enqueue() on it is the runner's, except for its completion.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "base/status.h"
#include "gpu/cuda_device.h"
#include "kernels/pieces.h"
#include "negotiation/process_set.h"
#include "wire/message.h"

namespace hvdlite {

// The end of one collective: the only way from the engine to the threads that wait for it.
//
// The entry owns its completion, and threads that wait keep the entry alive. The runner finishes it
// once; any number of threads wait. What an allgather, an alltoall or a reducescatter received
// travels out with it. Neither side ever holds the other's lock here: the continuation that then()
// was given runs after the lock is released.
//
// An operation on GPU tensors is done when all of it has been given to the device. Its results may
// be used after `on_device`, and its tensors' memory may be freed then.
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

// Where the GPU tensors of an entry are. They are ready at the point that `stream` (of that GPU)
// has come to when the entry is submitted.
struct GpuSource {
  int ordinal = 0;
  CudaStream stream = nullptr;
  CudaEventPtr ready;  // The engine marks that point by it.
};

// The input of a tensor that its own output overwrites, as it was before: an elastic job submits
// the entry anew if a rank dies (engine/commit_book.h).
struct KeptInput {
  std::unique_ptr<std::byte[]> data;
  std::size_t capacity = 0;  // `data` has room for so many bytes.
  InputCopy copy;            // to `data`; what it lacks has not been overwritten
  // Instead of `data`, of a GPU tensor; the memory goes back to `pool`.
  DeviceMemory device;
  std::shared_ptr<DeviceMemoryPool> pool;
  CudaEventPtr copied;  // the device has made the copy
  bool valid() const { return data != nullptr || device.valid(); }
};

struct Entry {
  Request request;
  std::string key;                  // request.key(), made once
  std::vector<const void*> inputs;  // Each tensor has one; the submitter keeps the memory alive.
  std::vector<void*> outputs;       // Each tensor has one, unless the completion brings the result.
  // An allgather, a reducescatter or an alltoall says for each tensor how many bytes of a result
  // fit at the output. 0, or too few numbers: the completion brings the result.
  std::vector<std::uint64_t> capacities;
  std::optional<GpuSource> gpu;   // where some tensor is on one
  double weight = 1.0;            // this rank's, for weighted averages
  std::int64_t submitted_at = 0;  // trace_now() at the call
  // The same, or earlier: when the program had the first gradient that it has submitted with this.
  std::int64_t began_at = 0;
  bool after_wait = false;           // as Arrival::after_wait
  std::uint32_t removes = 0;         // a removal's process set; the engine adds its ranks
  std::uint64_t order = UINT64_MAX;  // among the entries of its engine; the queue counts
  std::vector<KeptInput> kept;       // It is empty, or each tensor has one.
  // Late gradients: the submitter gives nothing, now and where it is late; its weight is 0.
  bool skips = false;
  bool late = false;  // The result is that of the others. Read it after the entry's end.
  std::shared_ptr<Completion> completion = std::make_shared<Completion>();

  std::uint64_t capacity(std::size_t tensor) const {
    return tensor < capacities.size() ? capacities[tensor] : 0;
  }
};
using EntryPtr = std::shared_ptr<Entry>;

// An entry that every member of its process set has submitted.
struct Agreed {
  EntryPtr entry;
  std::vector<std::int64_t> first_dimensions;  // Response says what these five are.
  std::vector<int> absent;
  std::uint32_t generation = 0;
  int set_id = -1;
  int last_joined = -1;
};

// What one respond frame holds for this rank, cut where the settings change.
struct Round {
  std::optional<Tunables> tunables;  // they hold from this round on
  bool settled = false;              // with `tunables`: for good
  std::vector<Agreed> entries;
};

struct TensorRef {
  std::size_t agreed = 0;  // index into the round
  std::size_t tensor = 0;  // index into that entry's tensors
};

// Tensors that travel fused, in one run of a data plane (plan_batches()).
struct Batch {
  Kind kind = Kind::kAllreduce;
  ElementTypes types = DataType::kFloat32;
  DeviceType device = DeviceType::kHost;  // all-reduce: of all tensors
  ReduceOp op = ReduceOp::kSum;
  bool weighted = false;
  std::uint32_t process_set = 0;
  std::uint32_t generation = 0;  // The group has this generation.
  std::uint64_t bytes = 0;       // So many bytes travel.
  // All-reduce: at least one; sends: all of one or more entries; otherwise all of one entry.
  std::vector<TensorRef> tensors;
};

// Local argument checks: errors that do not depend on other ranks. Pure functions; any thread.

// "what the call is: why".
Status invalid_call(const Request& request, const std::string& why);
// The same error, with what the call is in front of its message.
Status of_call(const Request& request, const Status& why);
// The error where an operation of this name is in flight.
Status duplicate_name(const Request& request);
// The error of a call, kInvalidArgument. `group` is its process set, null where there is none of
// that number.
Status check_entry(const Entry& entry, const GroupPtr& group, int rank);

// Makes an entry from what a caller of another language says: numbers for ops and dtypes,
// addresses, the ordinal of a GPU. Both ways into the engine build with it, Python's
// (python/engine.cc) and that of the C functions (engine/c_api.cc).
//
// A builder remembers the first thing that is wrong, and build() returns it. It belongs to one
// thread. The memory that tensors point to is not the builder's: the caller keeps it alive as Entry
// says.
inline constexpr int kHostMemory = -1;  // in place of a GPU's ordinal

// The shape of a tensor in host memory. kInvalidArgument where `dtype` or `wire` is not the number
// of a DataType, or a dimension is negative.
Result<TensorShape> make_shape(std::string name, int dtype, int wire,
                               std::vector<std::int64_t> dims);

class EntryBuilder {
 public:
  EntryBuilder(Kind kind, std::string name, std::uint32_t process_set = 0);

  // `op` is the number of a ReduceOp.
  EntryBuilder& reduce(int op, double prescale, double postscale);
  EntryBuilder& weigh(std::optional<double> weight);
  EntryBuilder& transaction(std::string name) {
    entry_->request.transaction = std::move(name);
    return *this;
  }
  EntryBuilder& root(int rank) {
    entry_->request.root = rank;
    return *this;
  }
  // An average that goes on without late ranks. With `skips` this rank gives nothing to it.
  EntryBuilder& late(LateTerms terms, bool skips);
  EntryBuilder& splits(std::vector<std::int64_t> rows) {
    entry_->request.splits = std::move(rows);
    return *this;
  }
  // The process set that is added has these ranks.
  EntryBuilder& ranks(std::vector<std::int64_t> ranks) {
    entry_->request.ranks = std::move(ranks);
    return *this;
  }
  EntryBuilder& removes(std::uint32_t process_set) {
    entry_->removes = process_set;
    return *this;
  }
  // Adds a tensor on this GPU, where it is ready at the point that `stream` has come to, or one in
  // kHostMemory. All GPU tensors of an entry are on the same GPU.
  EntryBuilder& tensor(TensorShape shape, const void* input, void* output, int gpu,
                       CudaStream stream);
  // Says that a result of so many bytes fits at the output of the last tensor, see
  // Entry::capacities.
  EntryBuilder& capacity(std::uint64_t bytes);

  // The error of this call that something else has found.
  Status refused(const Status& why) const;
  // Once, and last. kInvalidArgument: the caller's numbers are wrong.
  Result<EntryPtr> build();

 private:
  void refuse(const std::string& why);

  EntryPtr entry_ = std::make_shared<Entry>();
  Status wrong_;  // the first thing that is
};

}  // namespace hvdlite
