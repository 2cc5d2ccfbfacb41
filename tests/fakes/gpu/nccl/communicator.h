// A rank's end of a communicator, and every wait in it.
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

// One operation as called. The scale of a pre-multiplied sum is of the operation's type.
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

  // Says which rank of how many this is, where a split decides it later. Before join().
  void become(int rank, int size) {
    rank_ = rank;
    size_ = size;
  }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Opens the file and meets the others. Thread: the caller's or one of its own.
  ncclResult_t join(const ncclUniqueId& id);
  // Waits until all ranks arrive; false: give up, the reason is in error().
  bool meet(SharedBarrier& barrier);
  // Asked in every wait: false when there is no point in waiting any longer, because of an abort, a
  // mismatch or the deadline. A peer that died becomes the asynchronous error and leaves this one
  // stuck, as NCCL's kernels are, until somebody aborts.
  bool keep_waiting(std::chrono::steady_clock::time_point deadline);
  std::chrono::steady_clock::time_point deadline() const;

  // The peer's process ended, or it aborted or destroyed its end.
  bool is_lost(int peer) const;

  // Everybody's asynchronous error becomes `text`.
  void fail_all(const std::string& text);
  void set_error(ncclResult_t code, const std::string& text);
  ncclResult_t error() const { return static_cast<ncclResult_t>(error_.load()); }
  // ncclInProgress while init or a launch is under way, else error().
  ncclResult_t state() const;
  void begin_progress() { ++in_progress_; }
  void end_progress() { --in_progress_; }

  // Groups on streams: queued, then running.
  void queue_work() { ++queued_; }
  void begin_work() { ++running_; }
  void end_work() {
    --queued_;
    --running_;
  }
  void drop_work() { --queued_; }
  // Until nothing runs; without an abort, until nothing is queued either.
  void wait_for_work() const;
  // Until nothing is queued, or an abort.
  ncclResult_t wait_until_flushed();
  void abort() { aborted_ = true; }
  bool aborted() const { return aborted_; }

  // Tells the peers. Nothing of this rank runs any more.
  void leave();

  // After join().
  SharedFile& file() { return *file_; }

  // Reduce operations with a scale, as numbers from ncclNumOps on.
  int add_scale(std::uint64_t bits);
  bool remove_scale(int op);
  // False: no such operation.
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

// Runs on a stream's thread: the operations of one group, in order; Send and Recv together at last.
void run_group(Communicator& communicator, const std::vector<Operation>& operations);
// Of run_group: all transfers at once, those with one peer in order.
void run_transfers(Communicator& communicator, const std::vector<Operation>& transfers);

std::size_t element_bytes(int dtype);
// Reduces `count` elements of inputs[0..size) in that order.
void reduce(const Descriptor& what, std::uint64_t scale, const std::vector<const char*>& inputs,
            char* output, std::size_t count);

}  // namespace fakegpu
