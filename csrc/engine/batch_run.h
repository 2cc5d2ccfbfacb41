// One batch on its way through a data plane: open(), execute(), close(), and then it is gone.
//
// A weighted average is two all-reduces: the weights of the batch's tensors (a few float64 numbers,
// summed like any other), then the tensors, each scaled on the way in by this rank's share of the
// sum. A rank of weight 0 contributes zeros, whatever its tensors hold.
// Tensors in host memory take the host's data plane, those on a GPU the data plane of their process
// set. A batch on a GPU is done when the device has been given all of it; the weights of its
// tensors still travel on the host. What an allgather, an alltoall or a reducescatter receives goes
// to the memory that the submitter gave, where it fits. Otherwise it goes to memory that is
// allocated here, and travels out with the entry's completion: a rank that gave too little memory
// takes part as the others do, and its entry alone ends with an error.
//
// The executor makes a BatchRun for each batch, and lends it all that its constructor takes; only
// the runner calls it.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/entry.h"
#include "engine/fusion_plan.h"
#include "engine/kept_inputs.h"
#include "engine/parts.h"

namespace hvdlite {

// Who takes part in a batch: the members of its process set that have not joined. Sends do not ask.
struct Members {
  Group group;
  Presence present;  // The index is a position in the set.
};

// Memory that is kept for its capacity. Every batch fills it anew.
struct BatchBuffers {
  explicit BatchBuffers(EngineParts& parts) : kept(parts.gpus) {}

  KeptInputs kept;
  std::vector<Piece> pieces;
  std::vector<double> weights;   // Each tensor has one; then they hold the sums.
  std::vector<std::byte> zeros;  // what a rank of weight 0 gives
};

class BatchRun {
 public:
  BatchRun(EngineParts& parts, BatchBuffers& buffers, const Batch& batch, const Members& members,
           const std::vector<Agreed>& round)
      : parts_(parts),
        buffers_(buffers),
        batch_(batch),
        members_(members),
        round_(round),
        patience_(patience_of(parts.config.collective_timeout)) {}

  // Opens the data plane of the batch's GPU tensors, if there are any, and puts it in order after
  // their producers. A status that is not sticky is the same on every member, and concerns the
  // batch alone.
  Status open();
  // Elastic jobs: keeps the inputs that execute() overwrites, or lets it do so.
  Status keep_inputs() { return buffers_.kept.keep(batch_, round_, *parts_.backend, gpu_); }
  Status execute();
  // Marks the end of the batch on its GPU.
  Status close();

 private:
  const Agreed& first() const { return round_[batch_.tensors[0].agreed]; }
  const Entry& entry_of(const TensorRef& ref) const { return *round_[ref.agreed].entry; }
  Backend& plane_of(DeviceType device) const {
    return device == DeviceType::kHost ? *parts_.backend : *gpu_;
  }
  Status execute_kind();
  Status change_sets();
  void note_change(const Group& group, const std::string& what);
  Status allreduce();
  Status sum_weights();
  // batch_run_rows.cc
  Status allgather();
  Status reducescatter();
  Status alltoall();
  Status broadcast();
  Status send();
  // Returns where the result of the entry's next tensor goes, on the device of the tensor. The
  // input may lie at `own_part` of the result, and otherwise not in it; -1: nowhere.
  Result<std::byte*> add_output(const Entry& entry, std::size_t bytes,
                                std::ptrdiff_t own_part = -1);
  // All tensors of the entry are done: copies the results that could not be written to their
  // memory at once, and notes one that does not fit.
  void settle_outputs(const Entry& entry);

  EngineParts& parts_;
  BatchBuffers& buffers_;
  const Batch& batch_;
  const Members& members_;
  const std::vector<Agreed>& round_;
  const Patience patience_;
  DeviceBackend* gpu_ = nullptr;  // where the batch has GPU tensors, from open() on
};

}  // namespace hvdlite
