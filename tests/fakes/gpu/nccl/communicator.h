// One rank's end of a communicator. Ranks are threads of one process; what they share is a World.
// The caller's thread, the threads of init and the streams' threads use both at the same time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "cuda/handles.h"
#include "hooks.h"

// The part of NCCL's interface (2.19 to 2.28) that the fake offers, with the public numbers.
using ncclComm_t = void*;
using ncclStream_t = void*;
using ncclRedOp_t = int;
struct ncclUniqueId {
  char internal[128];
};
// Newer libraries know more fields after these; `size` says how many the caller knows.
struct ncclConfig_t {
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};
inline constexpr unsigned kNcclConfigMagic = 0xcafebeef;

enum ncclResult_t : int {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};
enum ncclDataType_t : int {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
};
enum : ncclRedOp_t { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4, ncclNumOps };
inline constexpr int ncclScalarHostImmediate = 1;

namespace fakegpu {

// Remembers the text for ncclGetLastError and gives `code` back.
ncclResult_t fail(ncclResult_t code, const std::string& text);
std::string last_error();

enum class Kind {
  kNothing,
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kSend,
  kRecv
};

// What the ranks of a collective must have in common.
struct Descriptor {
  Kind kind = Kind::kNothing;
  int dtype = 0;
  int op = 0;
  int root = 0;
  std::uint64_t count = 0;
  std::uint64_t sequence = 0;
  bool operator==(const Descriptor&) const = default;
};
std::string describe(const Descriptor& descriptor);

// One operation as the user called it, with the scale of a pre-multiplied sum.
struct Operation {
  Descriptor what;
  const void* input = nullptr;
  void* output = nullptr;
  int peer = 0;
  double scale = 1;
};

struct Member {
  int device = -1;  // until it joins
  bool left = false;
  Descriptor current;
  std::vector<char> shown;  // its input of a collective, which others read between two meetings
};

// A point that all ranks reach before any of them goes on.
struct Meeting {
  int arrived = 0;
  std::uint64_t number = 0;
};

struct Message {
  Descriptor what;
  std::vector<char> bytes;
};

// The mutex guards all of it, but for what a member shows.
struct World {
  hvdlite::Mutex mutex;
  hvdlite::Condition changed;
  std::vector<Member> members;
  Meeting on_host;
  Meeting on_stream;
  std::string failure;                                          // of all ranks
  std::map<std::pair<int, int>, std::deque<Message>> messages;  // by source and destination
};

ncclUniqueId make_world();

class Communicator {
 public:
  Communicator(int rank, int size, int device) : rank(rank), size(size), device(device) {}

  // Meets the other ranks.
  ncclResult_t join(const ncclUniqueId& id);
  // False when the wait has ended otherwise, by the reason in error().
  bool meet(Meeting& meeting);
  // Waits until `ready`, under the world's mutex. False after an abort or a mismatch.
  // A peer that is gone becomes the asynchronous error; the operation stays stuck, as NCCL's
  // kernels do, until an abort.
  bool await(const std::function<bool()>& ready);
  // The peer has aborted or destroyed its end. Makes it the asynchronous error.
  void blame_if_lost(int peer);

  // Makes `text` the asynchronous error of all ranks.
  void fail_all(const std::string& text);
  void set_error(ncclResult_t code, const std::string& text);
  ncclResult_t error() const { return static_cast<ncclResult_t>(error_.load()); }
  // ncclInProgress while init or a launch is under way, otherwise error().
  ncclResult_t state() const { return in_progress_ > 0 ? ncclInProgress : error(); }
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

  // There is one after join() only.
  World& world() { return *world_; }

  // Reduce operations with a scale, as numbers from ncclNumOps on.
  int add_scale(double scale);
  bool remove_scale(int op);
  // False when there is no such operation.
  bool find_scale(int op, double& scale);
  int live_reduce_ops();

  const int rank;
  const int size;
  const int device;
  std::atomic<std::uint64_t> sequence{0};
  std::atomic<bool> launched{false};

 private:
  ncclResult_t check_duplicates();

  std::shared_ptr<World> world_;
  hvdlite::Mutex mutex_;
  std::map<int, double> scales_ HVDLITE_GUARDED_BY(mutex_);
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

// The calls of one thread between ncclGroupStart and ncclGroupEnd take effect at the end.
void begin_group();
ncclResult_t end_group();
// Checks one operation, and launches it at once or with its group.
ncclResult_t submit(const char* function, void* communicator, void* stream, Operation operation);
// Runs `work`, which makes or ends a communicator, in a thread of its own. Its result becomes the
// communicator's error.
ncclResult_t progress(const std::shared_ptr<Communicator>& communicator,
                      std::function<ncclResult_t()> work);

// Runs the operations of one group in order, on a stream's thread; Send and Recv come last.
void run_group(Communicator& communicator, const std::vector<Operation>& operations);

// Ends the registrations of a communicator that ends. Any that is left is a fault, unless the
// communicator is aborted.
void end_registrations(void* communicator, bool abort);

}  // namespace fakegpu
