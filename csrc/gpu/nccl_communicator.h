// One NCCL communicator: this rank's end of one process set on one device.
//
// This class never blocks inside NCCL: every call may answer "in progress", and this class then
// waits for the call and, at the same time, for the loss of a member (transport/waiter.h), so that
// a dead peer ends the wait with an error. Errors: kRankFailed names a lost member; kTimeout;
// kInternal carries NCCL's own last message. After an error only abort() may be called. Owned by
// NcclBackend. Runner only.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "base/deadline.h"
#include "gpu/cuda_device.h"
#include "gpu/nccl_api.h"
#include "transport/fabric.h"

namespace hvdlite {

class NcclCommunicator {
 public:
  // The group, and this rank's connections to its members; the fabric is borrowed.
  struct Membership {
    Group group;
    Fabric& fabric;
  };
  // Connects this rank with the other members of the group, which all call this with the same id.
  // kTimeout unless all of them do so within `patience`.
  static Result<std::unique_ptr<NcclCommunicator>> connect(std::shared_ptr<const NcclApi> api,
                                                           std::shared_ptr<CudaDevice> device,
                                                           Membership membership,
                                                           const NcclUniqueId& id,
                                                           Patience patience);
  ~NcclCommunicator() { abort(); }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  NcclComm get() const { return comm_; }
  int index() const { return membership_.group.index_of(membership_.fabric.topology.rank); }
  int size() const { return static_cast<int>(membership_.group.ranks.size()); }
  const NcclApi& api() const { return *api_; }

  // Runs `calls`, whose calls of NCCL become one group, and returns when the group is on the
  // stream. `operation` ("an allreduce") is for messages. `calls` returns the first result that is
  // not a success.
  Status enqueue(const char* operation, Patience patience,
                 const std::function<NcclResult()>& calls);
  // Makes a sum that multiplies this rank's input first. float32 and float64 only.
  Result<int> make_scaled_sum(DataType dtype, double factor);
  void destroy_op(int op) { (void)api_->op_destroy(op, comm_); }

  // Registers memory with NCCL, once, until forget_memory() or the end of the communicator. False
  // when NCCL has refused. An NCCL that cannot register memory at all takes any memory: true.
  bool know_memory(CudaPointer address, std::size_t bytes);
  void forget_memory(CudaPointer address);

  // Returns an error that came after enqueue() had returned.
  Status poll();
  // Ends NCCL's work on the device, and the communicator. Idempotent.
  void abort();
  // Ends the communicator in good order together with the members, or aborts it at the deadline.
  void close(Deadline deadline);

 private:
  NcclCommunicator(std::shared_ptr<const NcclApi> api, std::shared_ptr<CudaDevice> device,
                   Membership membership)
      : api_(std::move(api)), device_(std::move(device)), membership_(std::move(membership)) {}
  // Waits until NCCL has ended the call that gave `result`.
  Status await(NcclResult result, const char* operation, Patience patience);
  Status failure(NcclResult result, const std::string& operation);
  Status lost_member(const std::string& operation) const;

  const std::shared_ptr<const NcclApi> api_;
  const std::shared_ptr<CudaDevice> device_;
  const Membership membership_;
  NcclComm comm_ = nullptr;
  // The registrations of known memory, by address. No value: NCCL has refused. A null pointer: NCCL
  // is set not to register memory.
  std::map<CudaPointer, std::optional<void*>> registrations_;
};

// For enqueue(): calls `call` for each item until one fails.
template <typename Items, typename Call>
NcclResult for_all(const Items& items, Call&& call) {
  NcclResult worst = NcclResult::kSuccess;
  for (const auto& item : items) {
    const NcclResult result = call(item);
    if (result == NcclResult::kInProgress) worst = result;
    if (result != NcclResult::kSuccess && result != NcclResult::kInProgress) return result;
  }
  return worst;
}

}  // namespace hvdlite
