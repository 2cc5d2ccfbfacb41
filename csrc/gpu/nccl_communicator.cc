#include "gpu/nccl_communicator.h"

#include <algorithm>
#include <thread>

namespace hvdlite {
namespace {

using namespace std::chrono_literals;

// The time between two looks at NCCL, whose own threads wake nobody.
constexpr auto kPollInterval = 500us;
// The time to wait for the fabric's word on a lost peer: NCCL may see the loss first.
constexpr auto kGoodbyeTime = 500ms;

bool is_success(NcclResult result) { return result == NcclResult::kSuccess; }
bool is_accepted(NcclResult result) {
  return is_success(result) || result == NcclResult::kInProgress;
}

}  // namespace

Result<std::unique_ptr<NcclCommunicator>> NcclCommunicator::connect(
    std::shared_ptr<const NcclApi> api, std::shared_ptr<CudaDevice> device, Membership membership,
    const NcclUniqueId& id, Patience patience) {
  std::unique_ptr<NcclCommunicator> made(
      new NcclCommunicator(std::move(api), std::move(device), membership));
  const CudaDevice::Current current(*made->device_);
  NcclConfig config;
  const NcclResult result =
      made->api_->comm_init(&made->comm_, static_cast<int>(membership.group.ranks.size()), id,
                            membership.group.index_of(membership.fabric.topology.rank), &config);
  HVDLITE_RETURN_IF_ERROR(made->await(result, "starting NCCL", patience));
  return made;
}

Status NcclCommunicator::enqueue(const char* operation, Patience patience,
                                 const std::function<NcclResult()>& calls) {
  const CudaDevice::Current current(*device_);
  NcclResult result = api_->group_start();
  if (!is_success(result)) return failure(result, operation);
  const NcclResult called = calls();
  result = api_->group_end();  // also after an error, or the thread would stay in the group
  return await(is_accepted(called) ? result : called, operation, patience);
}

Result<int> NcclCommunicator::make_scaled_sum(DataType dtype, double factor) {
  int op = 0;
  float narrow = static_cast<float>(factor);
  void* scalar = dtype == DataType::kFloat64 ? static_cast<void*>(&factor) : &narrow;
  const NcclResult result =
      api_->premul_create(&op, scalar, nccl_dtype(dtype), kNcclScalarHostImmediate, comm_);
  if (!is_success(result)) return failure(result, "making a scaled sum");
  return op;
}

Status NcclCommunicator::await(NcclResult result, const char* operation, Patience patience) {
  if (is_success(result)) return Status();
  if (result != NcclResult::kInProgress) return failure(result, operation);
  const auto ready = [&] {
    const NcclResult asked = api_->comm_async_error(comm_, &result);
    if (!is_success(asked)) result = asked;
    return result != NcclResult::kInProgress;
  };
  const auto failed = [&] { return lost_member(operation); };
  const Deadline deadline = Deadline::after(patience);
  Status status;
  do {
    status = membership_.fabric.waiter->wait(ready, failed,
                                             deadline.earlier(Deadline::after(kPollInterval)));
  } while (status.code() == StatusCode::kTimeout && !deadline.passed());
  if (status.code() == StatusCode::kTimeout) {
    return Status(StatusCode::kTimeout, "NCCL made no progress in " + std::string(operation) +
                                            " within collective_timeout; run with NCCL_DEBUG=INFO "
                                            "to see which connection it waits for");
  }
  if (!status.ok()) return status;
  return is_success(result) ? Status() : failure(result, operation);
}

Status NcclCommunicator::failure(NcclResult result, const std::string& operation) {
  // Such an error is most often the end of a peer. Then the lost rank is the cause to name.
  if (result == NcclResult::kRemoteError || result == NcclResult::kSystemError) {
    Status lost;
    const auto found = [&] { return !(lost = lost_member(operation)).ok(); };
    (void)membership_.fabric.waiter->wait(
        found, [] { return Status(); }, Deadline::after(kGoodbyeTime));
    if (!lost.ok()) return lost;
  }
  const char* last = api_->last_error(comm_);
  std::string words = last == nullptr ? "" : last;
  std::replace(words.begin(), words.end(), '\n', ' ');
  return Status(StatusCode::kInternal,
                "NCCL " + nccl_version_text(api_->version) + " failed in " + operation +
                    " on rank " + std::to_string(membership_.fabric.topology.rank) + ", " +
                    device_->describe() + ": " + api_->error_string(result) +
                    (words.empty() ? "" : " (" + words + ")") +
                    "; run with NCCL_DEBUG=INFO for what led to it",
                membership_.fabric.topology.rank);
}

Status NcclCommunicator::lost_member(const std::string& operation) const {
  for (const int rank : membership_.group.ranks) {
    if (rank == membership_.fabric.topology.rank || !membership_.fabric.waiter->lost(rank))
      continue;
    return Status(StatusCode::kRankFailed,
                  "rank " + std::to_string(rank) + " was lost during " + operation, rank);
  }
  return Status();
}

bool NcclCommunicator::know_memory(CudaPointer address, std::size_t bytes) {
  const auto [at, is_new] = registrations_.try_emplace(address);
  if (is_new) {
    const CudaDevice::Current current(*device_);
    void* registration = nullptr;
    void* memory = reinterpret_cast<void*>(address);  // NOLINT: NCCL's form of an address
    if (is_success(api_->comm_register(comm_, memory, bytes, &registration))) {
      at->second = registration;
    }
  }
  return at->second.has_value();
}

void NcclCommunicator::forget_memory(CudaPointer address) {
  const auto at = registrations_.find(address);
  if (at == registrations_.end()) return;
  if (comm_ != nullptr && at->second.value_or(nullptr) != nullptr) {
    const CudaDevice::Current current(*device_);
    (void)api_->comm_deregister(comm_, *at->second);
  }
  registrations_.erase(at);
}

Status NcclCommunicator::poll() {
  NcclResult result = NcclResult::kSuccess;
  const NcclResult asked = api_->comm_async_error(comm_, &result);
  if (!is_success(asked)) result = asked;
  return is_accepted(result) ? Status() : failure(result, "a collective that was under way");
}

void NcclCommunicator::abort() {
  if (comm_ == nullptr) return;
  const CudaDevice::Current current(*device_);
  (void)api_->comm_abort(std::exchange(comm_, nullptr));
}

void NcclCommunicator::close(Deadline deadline) {
  if (comm_ == nullptr) return;
  while (!registrations_.empty()) forget_memory(registrations_.begin()->first);
  const CudaDevice::Current current(*device_);
  NcclResult result = api_->comm_finalize(comm_);
  while (result == NcclResult::kInProgress && !deadline.passed()) {
    if (!is_success(api_->comm_async_error(comm_, &result))) break;
    std::this_thread::sleep_for(kPollInterval);
  }
  if (!is_success(result)) return abort();
  (void)api_->comm_destroy(std::exchange(comm_, nullptr));
}

}  // namespace hvdlite
