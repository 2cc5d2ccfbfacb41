// The data plane of a group of one rank on a GPU. It copies and scales on the device, and needs no
// NCCL. Runner only.
#pragma once

#include "gpu/device_backend.h"
#include "gpu/device_workspace.h"

namespace hvdlite {

class SelfDeviceBackend : public DeviceBackend {
 public:
  explicit SelfDeviceBackend(DeviceWorkspace& workspace) : workspace_(workspace) {}  // borrowed

  std::string_view name() const override { return "self on a GPU"; }
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
  Status barrier(const Group&, Patience) override { return Status(); }

 private:
  Status copy(std::span<const std::byte> from, std::span<std::byte> to);
  Status cast_and_back(ElementTypes types, std::span<const Piece> pieces);

  DeviceWorkspace& workspace_;
};

}  // namespace hvdlite
