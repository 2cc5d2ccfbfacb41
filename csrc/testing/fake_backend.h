// A data plane for tests of the engine: one rank, records what it is asked, fails on demand.
// Results are those of a world in which every other rank contributes nothing.
#pragma once

#include <string>
#include <vector>

#include "backend/self_backend.h"

namespace hvdlite {

class FakeBackend : public SelfBackend {
 public:
  // Both are borrowed from the test: what was called, and the error that the next calls end with.
  FakeBackend(std::vector<std::string>& calls, const Status& failure)
      : calls_(calls), failure_(failure) {}

  std::string_view name() const override { return "fake"; }
  Status allreduce(const Group& group, ElementTypes types, ReduceOp op,
                   std::span<const Piece> pieces, Patience patience) override {
    calls_.push_back("allreduce of " + std::to_string(pieces.size()) + " " +
                     std::string(name_of(types.memory)) + " by " + std::string(name_of(op)));
    return failure_.ok() ? SelfBackend::allreduce(group, types, op, pieces, patience) : failure_;
  }
  Status reducescatter(const Group& group, DataType dtype, ReduceOp op, const Piece& piece,
                       std::span<const std::uint64_t> counts, Patience patience) override {
    calls_.push_back("reducescatter of " + std::to_string(piece.count) + " " +
                     std::string(name_of(dtype)) + " by " + std::string(name_of(op)));
    if (!failure_.ok()) return failure_;
    return SelfBackend::reducescatter(group, dtype, op, piece, counts, patience);
  }
  Status alltoall(const Group& group, std::span<const std::byte> input,
                  std::span<const std::size_t> send_bytes, std::span<std::byte> output,
                  std::span<const std::size_t> receive_bytes, Patience patience) override {
    calls_.push_back("alltoall of " + std::to_string(input.size()) + " bytes");
    if (!failure_.ok()) return failure_;
    return SelfBackend::alltoall(group, input, send_bytes, output, receive_bytes, patience);
  }
  Status barrier(const Group&, Patience) override {
    calls_.push_back("barrier");
    return failure_;
  }

 private:
  std::vector<std::string>& calls_;
  const Status& failure_;
};

}  // namespace hvdlite
