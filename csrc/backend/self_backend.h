// The data plane of a world of one: copies and scales.
#pragma once

#include "backend/backend.h"

namespace hvdlite {

class SelfBackend : public Backend {
 public:
  std::string_view name() const override { return "self"; }
  Viability viable() const override { return {}; }
  Status allreduce(const Group& group, DataType dtype, ReduceOp op, std::span<const Piece> pieces,
                   Deadline deadline) override;
  Status allgather(const Group& group, std::span<const std::byte> input,
                   std::span<const std::size_t> bytes, std::span<std::byte> output,
                   Deadline deadline) override;
  Status broadcast(const Group& group, int root, std::span<const std::byte> input,
                   std::span<std::byte> output, Deadline deadline) override;
  Status barrier(const Group&, Deadline) override { return Status(); }
};

}  // namespace hvdlite
