// The data plane of GPU tensors where some member has no NCCL, and of reductions that a device does
// not know (device_types.h). Tensors go to the host, through the host's data plane, and back. That
// is correct and slow: its calls wait for the device. Runner only.
#pragma once

#include <utility>
#include <vector>

#include "gpu/device_backend.h"
#include "gpu/device_workspace.h"

namespace hvdlite {

class StagedBackend : public DeviceBackend {
 public:
  StagedBackend(DeviceWorkspace& workspace, Backend& host, int rank)  // both borrowed
      : workspace_(workspace), host_(host), rank_(rank) {}

  std::string_view name() const override { return "GPU through the host"; }
  Viability viable() const override { return {}; }
  CudaDevice& device() const override { return *workspace_.device; }
  Status allreduce(const Group& group, ElementTypes types, ReduceOp op,
                   std::span<const Piece> pieces, Patience patience) override;
  Status allgather(const Group& group, std::span<const std::byte> input,
                   std::span<const std::size_t> bytes, std::span<std::byte> output,
                   Patience patience) override;
  Status broadcast(const Group& group, int root, std::span<const std::byte> input,
                   std::span<std::byte> output, Patience patience) override;
  Status reducescatter(const Group& group, DataType dtype, ReduceOp op, const Piece& piece,
                       std::span<const std::uint64_t> counts, Patience patience) override;
  Status alltoall(const Group& group, std::span<const std::byte> input,
                  std::span<const std::size_t> send_bytes, std::span<std::byte> output,
                  std::span<const std::size_t> receive_bytes, Patience patience) override;
  Result<FiniteWord> look_for_nonfinite() override {
    return nonfinite_ = std::make_shared<std::uint32_t>(0);
  }
  // Makes the next allreduce set this word, like look_for_nonfinite(); with null it does not look.
  void look_in(FiniteWord word) { nonfinite_ = std::move(word); }
  Status barrier(const Group& group, Patience patience) override {
    return host_.barrier(group, patience);
  }

 private:
  // Both copy and wait. A null source stands for zeros.
  Status fetch(const void* from, std::span<std::byte> to, Patience patience);
  Status store(std::span<const std::byte> from, void* to, Patience patience);
  // Waits for the communication stream.
  Status wait_for_device(Patience patience);

  DeviceWorkspace& workspace_;
  Backend& host_;
  const int rank_;                // of this process in the world
  std::vector<std::byte> input_;  // on the host
  std::vector<std::byte> output_;
  FiniteWord nonfinite_;  // the word that the next allreduce sets; null: it does not look
};

}  // namespace hvdlite
