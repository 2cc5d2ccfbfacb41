// Which tensors travel together: a pure function of one round.
//
// Tensors of all-reduces with the same members, device, dtypes, op and weighting share one *batch*
// until it would exceed the threshold, the latest of the last few that have room; a tensor larger
// than the threshold is a batch of its own. By Adasum the tensors of one entry travel together
// whatever their size, and with no others: so bits never depend on what happens to be fused. A
// batch keeps the place of its first tensor, so batches of different process sets stay in the
// coordinator's order. Sends that follow each other are one batch, and move at the same time; but
// never with anything between them, for which other ranks might wait. Everything else is a batch of
// its own.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/entry.h"

namespace hvdlite {

struct TensorRef {
  std::size_t agreed = 0;  // index into the round
  std::size_t tensor = 0;  // index into that entry's tensors
};

struct Batch {
  Kind kind = Kind::kAllreduce;
  ElementTypes types = DataType::kFloat32;
  DeviceType device = DeviceType::kHost;  // all-reduce: of all tensors
  ReduceOp op = ReduceOp::kSum;
  bool weighted = false;
  std::uint32_t process_set = 0;
  std::uint32_t generation = 0;  // The group has this generation.
  std::uint64_t bytes = 0;       // So many bytes travel.
  // All-reduce: at least one; sends: all of one or more entries; otherwise all of one entry.
  std::vector<TensorRef> tensors;
};

std::vector<Batch> plan_batches(const std::vector<Agreed>& round, std::uint64_t threshold);

}  // namespace hvdlite
