// One NCCL communicator: this rank's end of one process set on one device.
//
// It never blocks inside NCCL: every call may answer "in progress", and this class then waits for
// it together with what the fabric tells of the members, so that a dead peer ends in an error.
// Errors carry NCCL's own last words. After one, only abort() makes sense. Runner only.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "base/deadline.h"
#include "cuda/cuda_device.h"
#include "nccl/nccl_api.h"
#include "transport/fabric.h"

namespace hvdlite {

class NcclCommunicator {
 public:
  // Where this rank stands; the fabric is borrowed.
  struct Place {
    Group group;
    Fabric& fabric;
  };
  // Meets the other members of the group, which call it with the same id; all come within
  // `patience`.
  static Result<std::unique_ptr<NcclCommunicator>> join(std::shared_ptr<const NcclApi> api,
                                                        std::shared_ptr<CudaDevice> device,
                                                        Place place, const NcclUniqueId& id,
                                                        Patience patience);
  ~NcclCommunicator() { abort(); }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  NcclComm get() const { return comm_; }
  int index() const { return place_.group.index_of(place_.fabric.topology.rank); }
  int size() const { return static_cast<int>(place_.group.ranks.size()); }
  const NcclApi& api() const { return *api_; }

  // Gives what `calls` calls to NCCL as one group; returns when it is on the stream. `operation`
  // ("an allreduce") is for messages. `calls` returns the first result that is no success.
  Status enqueue(const char* operation, Patience patience,
                 const std::function<NcclResult()>& calls);
  // A sum that multiplies this rank's input first. float32 and float64 only.
  Result<int> make_scaled_sum(DataType dtype, double factor);
  void destroy_op(int op) { (void)api_->op_destroy(op, comm_); }

  // Registers memory with NCCL, once, until forget_memory() or the end, whichever is first. False:
  // NCCL has refused it; what it cannot register at all it takes as it is.
  bool know_memory(CudaPointer address, std::size_t bytes);
  void forget_memory(CudaPointer address);

  // An error that came after enqueue() had returned.
  Status poll();
  // Ends what runs on the device, and the communicator. Idempotent.
  void abort();
  // Leaves in good order together with the members, or aborts at the deadline.
  void close(Deadline deadline);

 private:
  NcclCommunicator(std::shared_ptr<const NcclApi> api, std::shared_ptr<CudaDevice> device,
                   Place place)
      : api_(std::move(api)), device_(std::move(device)), place_(std::move(place)) {}
  // Waits until NCCL is done with what it was asked.
  Status await(NcclResult result, const char* operation, Patience patience);
  Status failure(NcclResult result, const std::string& operation);
  Status lost_member(const std::string& operation) const;

  const std::shared_ptr<const NcclApi> api_;
  const std::shared_ptr<CudaDevice> device_;
  const Place place_;
  NcclComm comm_ = nullptr;
  // Of known memory, by address. Null: without a registration, because NCCL is set not to make one.
  std::map<CudaPointer, std::optional<void*>> registrations_;
};

// For enqueue(): calls each until one fails.
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
