// Runs the rounds that the ranks have agreed on: plans the batches of a round, runs each of them
// through a data plane, and finishes its entries. In an elastic job it holds the entries instead,
// and commits behind the round (commit_book.h).
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
// The engine owns it, and lends it its parts; only the runner calls it, so it needs no lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "engine/commit_book.h"
#include "engine/entry.h"
#include "engine/parts.h"

namespace hvdlite {

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
std::vector<Batch> plan_batches(const std::vector<Agreed>& round, std::uint64_t threshold);

class Executor {
 public:
  explicit Executor(EngineParts& parts)
      : parts_(parts),
        patience_(patience_of(parts.config.collective_timeout)),
        threshold_(parts.config.fusion_threshold),
        kept_(parts.gpus) {}

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
  // Who takes part in a batch: the members of its process set that have not joined. Sends do not
  // ask.
  struct Members {
    Group group;
    Presence present;  // The index is a position in the set.
  };

  // The batch under way.
  const Agreed& first() const { return (*round_)[batch_->tensors[0].agreed]; }
  const Entry& entry_of(const TensorRef& ref) const { return *(*round_)[ref.agreed].entry; }
  Backend& plane_of(DeviceType device) const {
    return device == DeviceType::kHost ? *parts_.backend : *gpu_;
  }
  const Members& members_of(const Batch& batch);
  // Opens the data plane of the batch's GPU tensors, if there are any, and puts it in order after
  // their producers. A status that is not sticky is the same on every member, and concerns the
  // batch alone.
  Status open();
  Status execute();
  Status execute_kind();
  // Marks the end of the batch on its GPU.
  Status close();
  // The batch has ended, which began at `begun`: if it counts in steps, adds its time, and tells
  // the step clock of rank 0.
  void note_end(LiveFigures::Clock::time_point begun);
  // `left`: by entry of the round, its tensors that are not done yet.
  void finish_batch(std::vector<std::size_t>& left);
  void fail_batch(const Status& why);

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

  // Elastic jobs: hands out what is due, set by set.
  Status commit();
  // The set is gone: its transactions that are not committed fail.
  void drop_set(std::uint32_t set);
  // Waits until the device has made the results of these entries.
  Status await_device(const std::vector<EntryPtr>& entries, const Group& group);

  EngineParts& parts_;
  const Patience patience_;
  std::int64_t threshold_;  // bytes, of a batch
  KeptInputs kept_;
  std::map<std::uint32_t, Members> last_members_;  // of the last batch of a process set

  // The batch under way, in its round.
  const Batch* batch_ = nullptr;
  std::vector<Agreed>* round_ = nullptr;
  const Members* members_ = nullptr;
  DeviceBackend* gpu_ = nullptr;  // where the batch has GPU tensors, from open() on
  // Memory that is kept for its capacity. Every batch fills it anew.
  std::vector<Piece> pieces_;
  std::vector<double> weights_;   // Each tensor has one; then they hold the sums.
  std::vector<std::byte> zeros_;  // what a rank of weight 0 gives
};

}  // namespace hvdlite
