// A data plane for tests of the engine: it has one rank, records what it is asked for, and fails on
// demand. Its results are those of a world in which every other rank contributes nothing. Thread:
// the engine's runner; the test looks at the record when the runner is idle.
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

  Status allreduce(const Allreduce& call, Patience patience) override {
    calls_.push_back("allreduce of " + std::to_string(call.pieces.size()) + " " +
                     std::string(name_of(call.types.memory)) + " by " +
                     std::string(name_of(call.op)));
    return failure_.ok() ? SelfBackend::allreduce(call, patience) : failure_;
  }
  Status alltoall(const Alltoall& call, Patience patience) override {
    calls_.push_back("alltoall of " + std::to_string(call.input.size()) + " bytes");
    return failure_.ok() ? SelfBackend::alltoall(call, patience) : failure_;
  }
  Status reducescatter(const Reducescatter& call, Patience patience) override {
    calls_.push_back("reducescatter of " + std::to_string(call.piece.count) + " " +
                     std::string(name_of(call.dtype)) + " by " + std::string(name_of(call.op)));
    return failure_.ok() ? SelfBackend::reducescatter(call, patience) : failure_;
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
