// The data plane of GPUs: NCCL, between the members of one process set, each with one device.
//
// An all-reduce of one tensor runs where the tensor lies. Several tensors are packed into the
// device's fusion buffer, reduced there and unpacked: one kernel launch each way, which scales too.
// If the outputs lie in gradient memory as they would in the fusion buffer, then the gradient
// memory takes the buffer's place: nothing is unpacked, and inputs that are outputs are not packed.
// Each member decides this for itself. If some member has no memory for the fusion buffer, every
// tensor is reduced where it lies, all in one group call of NCCL. Averages are NCCL's own; float32
// and float64 tensors that need no packing are scaled by a pre-multiplied sum. What neither
// NCCL nor the kernels know, such as Adasum and 16-bit integers, is reduced through the host
// (staged_backend.h). Runner only.
#pragma once

#include <memory>
#include <vector>

#include "gpu/device_backend.h"
#include "gpu/device_workspace.h"
#include "gpu/fusion_layout.h"
#include "gpu/nccl_communicator.h"

namespace hvdlite {

class NcclBackend : public DeviceBackend {
 public:
  // Serves the group that `communicator` connects. `workspace` and `host` are borrowed; `host`
  // serves the barrier and what goes through the host. `fused` says that every member has a fusion
  // buffer.
  NcclBackend(std::unique_ptr<NcclCommunicator> communicator, DeviceWorkspace& workspace,
              Backend& host, bool fused);
  ~NcclBackend() override;

  CudaDevice& device() const override { return *workspace_.device; }
  Status allreduce(const Allreduce& call, Patience patience) override;
  Status allgather(const Allgather& call, Patience patience) override;
  Status broadcast(const Broadcast& call, Patience patience) override;
  Status alltoall(const Alltoall& call, Patience patience) override;
  Status reducescatter(const Reducescatter& call, Patience patience) override;
  Status barrier(const Group& group, Patience patience) override;
  Status poll() override { return communicator_->poll(); }
  void abort() override { communicator_->abort(); }
  void forget_memory(CudaPointer address) override { communicator_->forget_memory(address); }
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
  // scaled input to the output. If the kernels must look for NaN, they write the input to the
  // output in any case.
  Result<Direct> prepare(DataType dtype, ReduceOp op, const Piece& piece);
  Status scale_outputs(DataType dtype, std::span<const Piece> pieces);
  Status scatter(DataType dtype, ReduceOp op, const void* input, void* output,
                 std::span<const std::uint64_t> counts, Patience patience);

  const NcclApi& nccl() const { return communicator_->api(); }
  CudaStream stream() const { return workspace_.device->stream(); }

  DeviceWorkspace& workspace_;
  Backend& host_;
  const std::unique_ptr<NcclCommunicator> communicator_;
  const int index_;  // This rank has this index in the group.
  const int size_;
  const bool fused_;
  std::vector<CopySegment> segments_;
};

}  // namespace hvdlite
