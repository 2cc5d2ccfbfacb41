#include "nccl/group.h"

#include <chrono>
#include <thread>
#include <utility>

namespace fakegpu {
namespace {

struct Launch {
  std::shared_ptr<Communicator> communicator;
  void* stream = nullptr;
  std::vector<Operation> operations;
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Launch> launches;
  std::vector<std::shared_ptr<Communicator>> begun;  // inits that the end waits for
};
thread_local Group group;

struct Work {
  std::shared_ptr<Communicator> communicator;
  std::vector<Operation> operations;
};

void run_work(void* argument) {
  const std::unique_ptr<Work> work(static_cast<Work*>(argument));
  work->communicator->begin_work();
  run_group(*work->communicator, work->operations);
  work->communicator->end_work();
}

ncclResult_t put(const Launch& launch) {
  Communicator& communicator = *launch.communicator;
  auto work = std::make_unique<Work>(Work{launch.communicator, launch.operations});
  communicator.queue_work();
  const int error = fake_put(launch.stream, communicator.device, &run_work, work.get());
  if (error != 0) {
    communicator.drop_work();
    return fail(ncclUnhandledCudaError,
                "Cuda failure " + std::to_string(error) + " 'invalid resource handle'");
  }
  [[maybe_unused]] const Work* running = work.release();
  FAKE_NCCL_COUNT(communicator, collective_launches, 1);
  return ncclSuccess;
}

// NCCL connects lazily: the first launch of a non-blocking communicator is still under way when the
// call returns, and what is recorded on the stream then comes before it.
bool is_late(Communicator& communicator) {
  const bool first = !communicator.launched.exchange(true);
  const auto lazy = fake_option("FAKE_NCCL_LAZY", communicator.device, 1);
  return !communicator.blocking && (lazy == 2 || (lazy == 1 && first));
}

ncclResult_t start(const Launch& launch) {
  Communicator& communicator = *launch.communicator;
  if (!is_late(communicator)) return put(launch);
  communicator.begin_progress();
  std::thread([launch] {
    std::this_thread::sleep_for(std::chrono::milliseconds(
        fake_option("FAKE_NCCL_LAUNCH_DELAY_MS", launch.communicator->device, 5)));
    if (!launch.communicator->aborted()) {
      const ncclResult_t result = put(launch);
      if (result != ncclSuccess) launch.communicator->set_error(result, last_error());
    }
    launch.communicator->end_progress();
  }).detach();
  return ncclInProgress;
}

ncclResult_t check(const char* function, const Communicator& communicator,
                   const Operation& operation) {
  const Descriptor& what = operation.what;
  const std::string name = std::string(function) + " : ";
  if (what.dtype < 0 || what.dtype > ncclBfloat16) {
    return fail(ncclInvalidArgument, name + "invalid type " + std::to_string(what.dtype));
  }
  if (what.op < 0 || what.op > ncclNumOps) {
    return fail(ncclInvalidArgument, name + "invalid reduction operation");
  }
  if (what.root < 0 || what.root >= communicator.size() || operation.peer < 0 ||
      operation.peer >= communicator.size()) {
    return fail(ncclInvalidArgument, name + "invalid root or peer");
  }
  return ncclSuccess;
}

ncclResult_t add(const std::shared_ptr<Communicator>& communicator, void* stream,
                 const Operation& operation) {
  for (Launch& launch : group.launches) {
    if (launch.communicator != communicator) continue;
    if (launch.stream != stream) {
      return fail(ncclInvalidUsage, "the fake takes one stream per communicator and group");
    }
    launch.operations.push_back(operation);
    return ncclSuccess;
  }
  group.launches.push_back({communicator, stream, {operation}});
  return ncclSuccess;
}

// Turns a user's operation into its kind and its scale.
bool take_scale(Communicator& communicator, Operation& operation) {
  if (operation.what.op < ncclNumOps) return true;
  if (!communicator.find_scale(operation.what.op, operation.scale)) return false;
  operation.what.op = ncclNumOps;
  return true;
}

ncclResult_t try_submit(const char* function, void* handle, void* stream, Operation operation) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr) {
    return fail(ncclInvalidArgument,
                std::string(function) + " : comm argument is NULL or not a communicator");
  }
  if (const int failure = fake_take_failure(function, communicator->device)) {
    return fail(static_cast<ncclResult_t>(failure), std::string(function) + " : injected failure");
  }
  const ncclResult_t state = communicator->state();
  if (state != ncclSuccess) {
    return fail(state == ncclInProgress ? ncclInvalidArgument : state,
                "Attempt to use communicator before the previous operation returned ncclSuccess");
  }
  if (!take_scale(*communicator, operation)) {
    return fail(ncclInvalidArgument, std::string(function) + " : invalid reduction operation");
  }
  if (const ncclResult_t wrong = check(function, *communicator, operation)) return wrong;
  const bool transfer = operation.what.kind == Kind::kSend || operation.what.kind == Kind::kRecv;
  if (operation.what.count == 0 && !transfer) return ncclSuccess;
  // Ranks send and receive different numbers of messages.
  if (!transfer) operation.what.sequence = ++communicator->sequence;
  return add(communicator, stream, operation);
}

}  // namespace

void begin_group() { ++group.depth; }

ncclResult_t end_group() {
  if (group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--group.depth > 0) return ncclSuccess;
  const Group ended = std::exchange(group, Group{});
  if (ended.error != ncclSuccess) return ended.error;
  ncclResult_t result = ncclSuccess;
  for (const auto& communicator : ended.begun) {
    while (communicator->blocking && communicator->state() == ncclInProgress) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (communicator->state() != ncclSuccess) result = communicator->state();
  }
  for (const Launch& launch : ended.launches) {
    const ncclResult_t started = start(launch);
    if (started != ncclSuccess && (result == ncclSuccess || result == ncclInProgress)) {
      result = started;
    }
  }
  return result;
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
  const auto finish = [communicator, work = std::move(work)] {
    const ncclResult_t result = work();
    if (result != ncclSuccess) communicator->set_error(result, last_error());
    return result;
  };
  if (communicator->blocking && group.depth == 0) return finish();
  communicator->begin_progress();
  std::thread([communicator, finish] {
    finish();
    communicator->end_progress();
  }).detach();
  if (group.depth > 0) group.begun.push_back(communicator);
  return communicator->blocking ? ncclSuccess : ncclInProgress;
}

}  // namespace fakegpu
