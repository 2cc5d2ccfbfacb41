// The data plane of a world of one: copies and scales.
#pragma once

#include "backend/backend.h"

namespace hvdlite {

class SelfBackend : public Backend {
 public:
  std::string_view name() const override { return "self"; }
  Viability viable() const override { return {}; }
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
};

}  // namespace hvdlite
