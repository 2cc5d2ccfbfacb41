// The data plane of GPUs: NCCL, between the members of one process set, each with one device: this
// rank's end of one communicator.
//
// An all-reduce of one tensor runs where the tensor lies. Several tensors are packed into the
// device's fusion buffer, reduced there and unpacked: one kernel launch each way, which scales too.
// If the outputs lie in gradient memory as they would in the fusion buffer, then the gradient
// memory takes the buffer's place: nothing is unpacked, and inputs that are outputs are not packed.
// Each member decides this for itself. If some member has no memory for the fusion buffer, every
// tensor is reduced where it lies, all in one group call of NCCL. Averages are NCCL's own; float32
// and float64 tensors that need no packing are scaled by a pre-multiplied sum. What neither
// NCCL nor the kernels know, such as Adasum and 16-bit integers, is reduced through the host
// (StagedBackend).
//
// The runner never blocks inside NCCL: every call may answer "in progress", and enqueue() then
// waits for the call and, at the same time, for the loss of a member (transport/waiter.h), so that
// a dead peer ends the wait with an error. Errors: kRankFailed names a lost member; kTimeout;
// kInternal carries NCCL's own last message. After an error only abort() may be called. Runner
// only.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "gpu/cuda_device.h"
#include "gpu/device_backend.h"
#include "gpu/device_workspace.h"
#include "gpu/nccl_api.h"
#include "transport/fabric.h"

namespace hvdlite {

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

class NcclBackend : public DeviceBackend {
 public:
  // The group, and this rank's connections to its members; the fabric is borrowed.
  struct Membership {
    Group group;
    Fabric& fabric;
  };
  // Connects this rank with the other members of the group, which all call this with the same id.
  // kTimeout unless all of them do so within `patience`. `workspace` and `host` are borrowed;
  // `host` serves the barrier and what goes through the host. `fused` says that every member has a
  // fusion buffer.
  static Result<std::unique_ptr<NcclBackend>> connect(std::shared_ptr<const NcclApi> api,
                                                      Membership membership,
                                                      DeviceWorkspace& workspace, Backend& host,
                                                      const NcclUniqueId& id, bool fused,
                                                      Patience patience);
  ~NcclBackend() override { NcclBackend::abort(); }
  NcclBackend(const NcclBackend&) = delete;
  NcclBackend& operator=(const NcclBackend&) = delete;

  CudaDevice& device() const override { return *workspace_.device; }
  Status allreduce(const Allreduce& call, Patience patience) override;
  Status allgather(const Allgather& call, Patience patience) override;
  Status broadcast(const Broadcast& call, Patience patience) override;
  Status alltoall(const Alltoall& call, Patience patience) override;
  Status reducescatter(const Reducescatter& call, Patience patience) override;
  Status barrier(const Group& group, Patience patience) override {
    return host_.barrier(group, patience);
  }
  Status poll() override;
  void abort() override;
  void forget_memory(CudaPointer address) override;
  void close(Deadline deadline) override;

 private:
  // One tensor on its way through NCCL without a fusion buffer.
  struct Direct {
    const void* input;
    void* output;
    std::uint64_t count;
    int op;
    bool own_op;  // to be destroyed
  };

  // As Backend::allreduce, for the types and ops that NCCL knows.
  Status reduce(ElementTypes types, ReduceOp op, std::span<const Piece> pieces, Patience patience);
  Status reduce_fused(ElementTypes types, ReduceOp op, std::span<const Piece> pieces,
                      Patience patience);
  Status reduce_round(ElementTypes types, ReduceOp op, std::span<const Piece> pieces,
                      const FusedRound& round, Patience patience);
  // The address in gradient memory at which the round's outputs lie as laid out; 0 when they do
  // not.
  CudaPointer gradient_memory_of(ElementTypes types, std::span<const Piece> pieces,
                                 const FusedRound& round);
  Status pack(ElementTypes types, std::span<const Piece> pieces, const FusedRound& round,
              CudaPointer buffer);
  Status unpack(ElementTypes types, std::span<const Piece> pieces, const FusedRound& round,
                CudaPointer buffer);
  // Reduces a single piece, in gradient memory if it lies there and needs no op of its own.
  Status reduce_one(DataType dtype, ReduceOp op, const Piece& piece, Patience patience);
  Status reduce_in_place(DataType dtype, ReduceOp op, std::span<const Piece> pieces,
                         Patience patience);
  // Applies the factor of the input: through a scaled op of NCCL, or by a kernel that writes the
  // scaled input to the output.
  Result<Direct> prepare(DataType dtype, ReduceOp op, const Piece& piece);
  Status scale_outputs(DataType dtype, std::span<const Piece> pieces);
  Status scatter(DataType dtype, ReduceOp op, const void* input, void* output,
                 std::span<const std::uint64_t> counts, Patience patience);

  NcclBackend(std::shared_ptr<const NcclApi> api, Membership membership, DeviceWorkspace& workspace,
              Backend& host, bool fused)
      : workspace_(workspace),
        host_(host),
        api_(std::move(api)),
        membership_(std::move(membership)),
        fused_(fused) {}
  // Runs `calls`, whose calls of NCCL become one group, and returns when the group is on the
  // stream. `operation` ("an allreduce") is for messages. `calls` returns the first result that is
  // not a success.
  Status enqueue(const char* operation, Patience patience,
                 const std::function<NcclResult()>& calls);
  // Makes a sum that multiplies this rank's input first. float32 and float64 only.
  Result<int> make_scaled_sum(DataType dtype, double factor);
  // Registers memory with NCCL, once, until forget_memory() or the end of the communicator. False
  // when NCCL has refused. An NCCL that is set not to register memory takes any memory: true.
  bool know_memory(CudaPointer address, std::size_t bytes);
  // Waits until NCCL has ended the call that gave `result`.
  Status await(NcclResult result, const char* operation, Patience patience);
  Status failure(NcclResult result, const std::string& operation);
  Status lost_member(const std::string& operation) const;

  CudaStream stream() const { return workspace_.device->stream(); }
  // This rank's position in the group.
  int index() const { return membership_.group.index_of(membership_.fabric.topology.rank); }
  int size() const { return static_cast<int>(membership_.group.ranks.size()); }

  DeviceWorkspace& workspace_;
  Backend& host_;
  const std::shared_ptr<const NcclApi> api_;
  const Membership membership_;
  const bool fused_;
  NcclComm comm_ = nullptr;
  // The registrations of known memory, by address. No value: NCCL has refused. A null pointer: NCCL
  // is set not to register memory.
  std::map<CudaPointer, std::optional<void*>> registrations_;
  std::vector<CopySegment> segments_;
};

}  // namespace hvdlite
