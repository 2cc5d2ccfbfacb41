// Making, splitting and ending communicators.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "nccl/group.h"
#include "nccl/registration.h"

extern "C" int cuDriverGetVersion(int* version);

using namespace fakegpu;

namespace {

// The oldest driver that an NCCL built for CUDA 12 takes.
constexpr int kOldestDriver = 12000;

ncclResult_t check_driver() {
  int version = 0;
  cuDriverGetVersion(&version);
  const auto oldest = fake_option("FAKE_NCCL_OLDEST_DRIVER", -1, kOldestDriver);
  if (version >= oldest) return ncclSuccess;
  return fail(ncclUnhandledCudaError,
              "Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'");
}

ncclResult_t join_late(Communicator& communicator, const ncclUniqueId& id) {
  std::this_thread::sleep_for(std::chrono::milliseconds(
      fake_option("FAKE_NCCL_INIT_DELAY_MS", communicator.device, communicator.blocking ? 0 : 5)));
  if (communicator.aborted()) return fail(ncclRemoteError, "aborted");
  if (const ncclResult_t old = check_driver()) return old;
  if (const int failure = fake_take_failure("ncclCommInitRank", communicator.device)) {
    return fail(static_cast<ncclResult_t>(failure), "injected failure of init");
  }
  return communicator.join(id);
}

// Ends the communicator of a handle, once nothing of it runs.
ncclResult_t end(void* handle, bool abort) {
  const std::shared_ptr<Communicator> communicator = communicators().remove(handle);
  if (communicator == nullptr) return fail(ncclInvalidArgument, "comm is not a communicator");
  if (abort) communicator->abort();
  communicator->wait_for_work();
  end_registrations(handle, abort);
  FAKE_NCCL_COUNT(*communicator, live_communicators, -1);
  FAKE_NCCL_COUNT(*communicator, live_reduce_ops, -communicator->live_reduce_ops());
  communicator->leave();
  return ncclSuccess;
}

bool is_blocking(const ncclConfig_t* config) {
  return config == nullptr || config->size < sizeof(ncclConfig_t) || config->blocking != 0;
}

ncclResult_t make(ncclComm_t* out, int size, const ncclUniqueId& id, int rank,
                  const ncclConfig_t* config) {
  if (config != nullptr && (config->magic != kNcclConfigMagic || config->size == 0)) {
    return fail(ncclInvalidArgument, "ncclConfig_t argument not initialized");
  }
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    return fail(ncclInvalidArgument,
                "Invalid rank requested : " + std::to_string(rank) + "/" + std::to_string(size));
  }
  const auto communicator =
      std::make_shared<Communicator>(rank, size, fake_current_device(), is_blocking(config));
  *out = communicators().add(communicator);
  FAKE_NCCL_COUNT(*communicator, live_communicators, 1);
  const ncclResult_t result =
      progress(communicator, [communicator, id] { return join_late(*communicator, id); });
  if (result == ncclSuccess || result == ncclInProgress) return result;
  end(*out, true);
  *out = nullptr;
  return result;
}

// One rank's part of a split: its new rank, number of ranks and id; the lowest member makes the id.
struct Split {
  int rank = 0;
  int size = 0;
  ncclUniqueId id{};
};

ncclResult_t agree_on_split(Communicator& parent, int color, int key, Split& out) {
  SharedFile& file = parent.file();
  Member& self = file.members[parent.rank()];
  self.color = color;
  self.key = key;
  if (!parent.meet(file.on_host)) return parent.error();
  std::vector<std::pair<int, int>> members;  // (key, rank in the parent)
  for (int i = 0; i < parent.size(); ++i) {
    if (file.members[i].color == color) members.emplace_back(file.members[i].key, i);
  }
  std::sort(members.begin(), members.end());
  const int founder = members.front().second;
  if (founder == parent.rank() && color != kNcclSplitNoColor) {
    if (const ncclResult_t failed = make_file(self.child)) return failed;
  }
  if (!parent.meet(file.on_host)) return parent.error();
  const auto mine = std::find(members.begin(), members.end(), std::make_pair(key, parent.rank()));
  out.rank = static_cast<int>(mine - members.begin());
  out.size = static_cast<int>(members.size());
  out.id = file.members[founder].child;
  // No rank writes for a next split before all have read.
  return parent.meet(file.on_host) ? ncclSuccess : parent.error();
}

}  // namespace

FAKE_API ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
  if (const int failure = fake_take_failure("ncclGetUniqueId", fake_current_device())) {
    return fail(static_cast<ncclResult_t>(failure), "injected failure of ncclGetUniqueId");
  }
  return make_file(*out);
}

FAKE_API ncclResult_t ncclCommInitRank(ncclComm_t* out, int size, ncclUniqueId id, int rank) {
  return make(out, size, id, rank, nullptr);
}

FAKE_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank,
                                             ncclConfig_t* config) {
  return make(out, size, id, rank, config);
}

FAKE_API ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* out,
                                    ncclConfig_t* config) {
  const std::shared_ptr<Communicator> parent = communicators().find(handle);
  if (parent == nullptr) return fail(ncclInvalidArgument, "comm is not a communicator");
  if (parent->state() != ncclSuccess) return fail(ncclInvalidArgument, "comm is not ready");
  *out = nullptr;
  const bool blocking = config == nullptr ? parent->blocking : is_blocking(config);
  std::shared_ptr<Communicator> child;
  if (color != kNcclSplitNoColor) {
    child = std::make_shared<Communicator>(0, 1, parent->device, blocking);
    *out = communicators().add(child);
    FAKE_NCCL_COUNT(*child, live_communicators, 1);
  }
  const auto split = [parent, child, color, key]() -> ncclResult_t {
    Split result;
    if (const ncclResult_t failed = agree_on_split(*parent, color, key, result)) return failed;
    if (child == nullptr) return ncclSuccess;
    child->become(result.rank, result.size);
    return child->join(result.id);
  };
  return progress(child != nullptr ? child : parent, split);
}

FAKE_API ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr) return fail(ncclInvalidArgument, "comm is not a communicator");
  return progress(communicator, [communicator] { return communicator->wait_until_flushed(); });
}

FAKE_API ncclResult_t ncclCommDestroy(ncclComm_t handle) { return end(handle, false); }

FAKE_API ncclResult_t ncclCommAbort(ncclComm_t handle) { return end(handle, true); }

FAKE_API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* out) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr) return fail(ncclInvalidArgument, "comm is not a communicator");
  *out = communicator->state();
  return ncclSuccess;
}
