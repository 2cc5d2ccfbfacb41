// One rank's end of a communicator, with every wait that happens in it. The caller's thread, the
// threads of init and the streams' threads use it at the same time; all of its state is atomic or
// guarded by the mutex.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "cuda/handles.h"
#include "nccl/nccl_abi.h"
#include "nccl/shared_file.h"

namespace fakegpu {

// Remembers the text for ncclGetLastError and gives `code` back.
ncclResult_t fail(ncclResult_t code, const std::string& text);
std::string last_error();

// One operation as the user called it. The scale of a pre-multiplied sum has the operation's type.
struct Operation {
  Descriptor what;
  const void* input = nullptr;
  void* output = nullptr;
  int peer = 0;
  std::uint64_t scale = 0;
};

class Communicator {
 public:
  Communicator(int rank, int size, int device, bool blocking)
      : device(device), blocking(blocking), rank_(rank), size_(size) {}
  ~Communicator();

  // Sets rank and size, where a split decides them later. Call it before join().
  void become(int rank, int size) {
    rank_ = rank;
    size_ = size;
  }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Opens the file and meets the other ranks, on the caller's thread or one of its own.
  ncclResult_t join(const ncclUniqueId& id);
  // Waits until all ranks arrive. False when the wait has ended otherwise, by the reason in
  // error().
  bool meet(SharedBarrier& barrier);
  // Every wait asks this again and again. False after an abort, a mismatch or the deadline. A peer
  // that died becomes the asynchronous error; the operation stays stuck, as NCCL's kernels do,
  // until an abort.
  bool keep_waiting(std::chrono::steady_clock::time_point deadline);
  std::chrono::steady_clock::time_point deadline() const;

  // The peer's process has ended, or the peer has aborted or destroyed its end.
  bool is_lost(int peer) const;

  // Makes `text` the asynchronous error of all ranks.
  void fail_all(const std::string& text);
  void set_error(ncclResult_t code, const std::string& text);
  ncclResult_t error() const { return static_cast<ncclResult_t>(error_.load()); }
  // ncclInProgress while init or a launch is under way, otherwise error().
  ncclResult_t state() const;
  void begin_progress() { ++in_progress_; }
  void end_progress() { --in_progress_; }

  // Counts of groups on streams, which are first queued, then running.
  void queue_work() { ++queued_; }
  void begin_work() { ++running_; }
  void end_work() {
    --queued_;
    --running_;
  }
  void drop_work() { --queued_; }
  // Waits until nothing runs and, unless there was an abort, nothing is queued either.
  void wait_for_work() const;
  // Waits until nothing is queued, or for an abort.
  ncclResult_t wait_until_flushed();
  void abort() { aborted_ = true; }
  bool aborted() const { return aborted_; }

  // Tells the peers that this rank is gone. Nothing of this rank runs any more.
  void leave();

  // There is a file after join() only.
  SharedFile& file() { return *file_; }

  // Reduce operations with a scale, as numbers from ncclNumOps on.
  int add_scale(std::uint64_t bits);
  bool remove_scale(int op);
  // False when there is no such operation.
  bool find_scale(int op, std::uint64_t& bits);
  int live_reduce_ops();

  const int device;
  const bool blocking;
  std::atomic<std::uint64_t> sequence{0};
  std::atomic<bool> launched{false};

 private:
  ncclResult_t check_duplicates();

  std::atomic<int> rank_;
  std::atomic<int> size_;
  SharedFile* file_ = nullptr;
  hvdlite::Mutex mutex_;
  std::map<int, std::uint64_t> scales_ HVDLITE_GUARDED_BY(mutex_);
  int next_op_ HVDLITE_GUARDED_BY(mutex_) = ncclNumOps;
  std::atomic<int> error_{ncclSuccess};
  std::atomic<int> in_progress_{0};
  std::atomic<int> queued_{0};
  std::atomic<int> running_{0};
  std::atomic<bool> aborted_{false};
};

Handles<Communicator>& communicators();

// Adds to a counter of the communicator's device.
#define FAKE_NCCL_COUNT(communicator, name, change)                                                \
  fake_count((communicator).device, offsetof(FakeCounters, name), (change))

// Runs the operations of one group in order, on a stream's thread; Send and Recv come last, all
// together.
void run_group(Communicator& communicator, const std::vector<Operation>& operations);
// The part of run_group() that sends and receives: all transfers at once, those with one peer in
// order.
void run_transfers(Communicator& communicator, const std::vector<Operation>& transfers);

std::size_t element_bytes(int dtype);
// Reduces `count` elements of inputs[0..size) in that order.
void reduce(const Descriptor& what, std::uint64_t scale, const std::vector<const char*>& inputs,
            char* output, std::size_t count);

}  // namespace fakegpu
