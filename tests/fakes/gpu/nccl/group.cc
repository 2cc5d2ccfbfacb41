// The calls of one thread between ncclGroupStart and ncclGroupEnd.
#include <chrono>
#include <thread>
#include <utility>

#include "nccl/communicator.h"

namespace fakegpu {
namespace {

// NCCL connects lazily: the first launch is still under way when the call returns, and what is
// recorded on the stream then comes before it. So late it is.
constexpr auto kLaunchDelay = std::chrono::milliseconds(5);

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::shared_ptr<Communicator> communicator;
  void* stream = nullptr;
  std::vector<Operation> operations;
};
thread_local Group group;

void run_work(void* argument) {
  const std::unique_ptr<Group> work(static_cast<Group*>(argument));
  work->communicator->begin_work();
  run_group(*work->communicator, work->operations);
  work->communicator->end_work();
}

ncclResult_t put(const Group& ended) {
  Communicator& communicator = *ended.communicator;
  auto work = std::make_unique<Group>(ended);
  communicator.queue_work();
  const int error = fake_put(ended.stream, communicator.device, &run_work, work.get());
  if (error != 0) {
    communicator.drop_work();
    return fail(ncclUnhandledCudaError,
                "Cuda failure " + std::to_string(error) + " 'invalid resource handle'");
  }
  [[maybe_unused]] const Group* running = work.release();
  FAKE_NCCL_COUNT(communicator, collective_launches, 1);
  return ncclSuccess;
}

ncclResult_t check(const std::string& function, const Communicator& communicator,
                   const Operation& operation) {
  const Descriptor& what = operation.what;
  if (what.dtype < 0 || what.dtype > ncclBfloat16 || what.op < 0 || what.op > ncclNumOps) {
    return fail(ncclInvalidArgument, function + " : invalid type or reduction operation");
  }
  if (what.root < 0 || what.root >= communicator.size || operation.peer < 0 ||
      operation.peer >= communicator.size) {
    return fail(ncclInvalidArgument, function + " : invalid root or peer");
  }
  return ncclSuccess;
}

// Turns a user's operation into its kind and its scale.
bool take_scale(Communicator& communicator, Operation& operation) {
  if (operation.what.op < ncclNumOps) return true;
  if (!communicator.find_scale(operation.what.op, operation.scale)) return false;
  operation.what.op = ncclNumOps;
  return true;
}

ncclResult_t try_submit(const std::string& function, void* handle, void* stream,
                        Operation operation) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr) {
    return fail(ncclInvalidArgument, function + " : comm is not a communicator");
  }
  const ncclResult_t state = communicator->state();
  if (state != ncclSuccess) {
    return fail(state == ncclInProgress ? ncclInvalidArgument : state,
                "Attempt to use communicator before the previous operation returned ncclSuccess");
  }
  if (!take_scale(*communicator, operation)) {
    return fail(ncclInvalidArgument, function + " : invalid reduction operation");
  }
  if (const ncclResult_t wrong = check(function, *communicator, operation)) return wrong;
  const bool transfer = operation.what.kind == Kind::kSend || operation.what.kind == Kind::kRecv;
  if (operation.what.count == 0 && !transfer) return ncclSuccess;
  // Ranks send and receive different numbers of messages.
  if (!transfer) operation.what.sequence = ++communicator->sequence;
  if (!group.operations.empty() && (group.communicator != communicator || group.stream != stream)) {
    return fail(ncclInvalidUsage, "the fake takes one communicator and stream in a group");
  }
  group.communicator = communicator;
  group.stream = stream;
  group.operations.push_back(operation);
  return ncclSuccess;
}

}  // namespace

void begin_group() { ++group.depth; }

ncclResult_t end_group() {
  if (group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--group.depth > 0) return ncclSuccess;
  const Group ended = std::exchange(group, Group{});
  if (ended.error != ncclSuccess || ended.operations.empty()) return ended.error;
  if (ended.communicator->launched.exchange(true)) return put(ended);
  return progress(ended.communicator, [ended] {
    std::this_thread::sleep_for(kLaunchDelay);
    return ended.communicator->aborted() ? ncclSuccess : put(ended);
  });
}

ncclResult_t submit(const char* function, void* communicator, void* stream, Operation operation) {
  begin_group();
  const ncclResult_t result = try_submit(function, communicator, stream, operation);
  if (result != ncclSuccess && group.error == ncclSuccess) group.error = result;
  const ncclResult_t ended = end_group();
  return result != ncclSuccess ? result : ended;
}

ncclResult_t progress(const std::shared_ptr<Communicator>& communicator,
                      std::function<ncclResult_t()> work) {
  communicator->begin_progress();
  std::thread([communicator, work = std::move(work)] {
    const ncclResult_t result = work();
    if (result != ncclSuccess) communicator->set_error(result, last_error());
    communicator->end_progress();
  }).detach();
  return ncclInProgress;
}

}  // namespace fakegpu
