// Runs the rounds that the ranks have agreed on: plans the batches of a round, lets each of them
// run (BatchRun), and finishes its entries. In an elastic job it holds the entries instead, and
// commits behind the round (commit_book.h).
//
// Owned by the engine's world, which lends it the engine's parts; only the runner calls it, so it
// needs no lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "engine/commit_book.h"
#include "engine/entry.h"
#include "engine/fusion_plan.h"
#include "engine/parts.h"

namespace hvdlite {

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
  // executor_rows.cc
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

class Executor {
 public:
  explicit Executor(EngineParts& parts)
      : parts_(parts), threshold_(parts.config.fusion_threshold), buffers_(parts) {}

  // Executes the batches of one round and finishes its entries, each once all its tensors are done.
  // A failed status is final for the backend; entries that are not finished yet stay with the
  // caller, in `round` (finished and held ones are reset to null there).
  Status run(std::vector<Agreed>& round);
  // The rounds from here on use these settings.
  void tune(const Tunables& tunables) {
    threshold_ = tunables.fusion_threshold;
    parts_.backend->tune(tunables);
  }

 private:
  // Who takes part in the batch; `agreed` is its first entry.
  const Members& members_of(const Batch& batch, const Agreed& agreed);
  // `left`: by entry of the round, its tensors that are not done yet.
  void finish_batch(const Batch& batch, const Members& members, std::vector<Agreed>& round,
                    std::vector<std::size_t>& left);
  // The batch has ended, which began at `begun`: if it counts in steps, adds its time, and tells
  // the step clock of rank 0.
  void note_end(const Batch& batch, const std::vector<Agreed>& round,
                LiveFigures::Clock::time_point begun);
  void fail_batch(const Batch& batch, std::vector<Agreed>& round, const Status& why);
  // Elastic jobs: hands out what is due, set by set.
  Status commit();
  // The set is gone: its transactions that are not committed fail.
  void drop_set(std::uint32_t set);
  // Waits until the device has made the results of these entries.
  Status await_device(const std::vector<EntryPtr>& entries, const Group& group);

  EngineParts& parts_;
  std::int64_t threshold_;  // bytes, of a batch
  BatchBuffers buffers_;
  std::map<std::uint32_t, Members> members_;  // A process set has those of its last batch.
};

}  // namespace hvdlite
