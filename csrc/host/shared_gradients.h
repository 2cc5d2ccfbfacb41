// An all-reduce within one host of tensors that lie in gradient memory (transport/segment.h),
// without staging: each rank reads the others' tensors where they lie.
//
// The batch is cut into chunks and slices as in allreduce.h. Driver l reduces slice l of all ranks
// into its own memory, by the tree of sum_tree.h; the others then copy that slice into theirs. A
// rank writes to its own memory alone, so one that was given up for dead and goes on later can
// spoil nothing. A slice is overwritten only after its driver has read it; and a rank returns only
// when nobody reads its memory any more.
//
// Ranks show each other where their tensors lie when they publish the first chunk of a batch. They
// reduce in place where the tensors of all lie alike, which all see alike. Thread: the engine's
// runner.
#pragma once

#include <cstddef>
#include <vector>

#include "host/allreduce_batch.h"
#include "host/plane.h"
#include "kernels/pieces.h"

namespace hvdlite {

class SharedGradients {
 public:
  explicit SharedGradients(HostPlane& plane) : plane_(plane) {}  // borrowed

  // Shows where this rank's tensors of the batch lie; comes before the step is published.
  void show(const AllreduceBatch& batch, const Staging::Step& step);
  // Whether reduce() can run, when all locals have published the step.
  bool found(const AllreduceBatch& batch, const Staging::Step& step);
  // Reduces these elements. found() of the batch was true.
  Status reduce(const AllreduceBatch& batch, Range elements);

 private:
  Staging::Place place_of(const AllreduceBatch& batch) const;

  HostPlane& plane_;
  std::vector<std::ptrdiff_t> members_;  // see AllreduceBatch::Distances; of the last found()
};

}  // namespace hvdlite
