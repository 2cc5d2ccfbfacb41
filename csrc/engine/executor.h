// Runs the rounds that the ranks have agreed on: plans the batches of a round, lets each of them
// run (batch_run.h), and finishes its entries. In an elastic job it holds the entries instead, and
// commits behind the round (commit_book.h).
//
// Owned by the engine's world, which lends it the engine's parts; only the runner calls it, so it
// needs no lock.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "engine/batch_run.h"
#include "engine/entry.h"
#include "engine/fusion_plan.h"
#include "engine/parts.h"

namespace hvdlite {

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
  // executor_commit.cc, elastic jobs: hands out what is due, set by set.
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
