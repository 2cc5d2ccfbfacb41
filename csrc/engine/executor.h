// Runs batches on a backend and ends their entries.
//
// A weighted average is two all-reduces: the weights of the batch's tensors (a few float64 numbers,
// summed like any other), then the tensors, each scaled on the way in by this rank's share of the
// sum. A rank of weight 0 contributes zeros, whatever its tensors hold.
// Tensors in host memory go by the host's data plane, those on a GPU by the data plane of their
// process set. A batch on a GPU is done when the device has been given all of it; the weights of
// its tensors still travel on the host. What an allgather, an alltoall or a reducescatter receives
// goes to memory that is allocated here. Runner only.
#pragma once

#include <map>
#include <vector>

#include "backend/backend.h"
#include "base/config.h"
#include "engine/counters.h"
#include "engine/finite_check.h"
#include "engine/fusion_plan.h"
#include "engine/tensor_queue.h"
#include "engine/timeline.h"
#include "gpu/gpu_plane.h"
#include "negotiation/process_set.h"

namespace hvdlite {

class Executor {
 public:
  // All borrowed from the engine.
  Executor(int rank, Backend& backend, GpuPlane& gpus, ProcessSets& sets, const Config& config,
           TensorQueue& queue, Counters& counters, Timeline& timeline)
      : rank_(rank),
        backend_(backend),
        gpus_(gpus),
        sets_(sets),
        config_(config),
        threshold_(config.fusion_threshold),
        queue_(queue),
        counters_(counters),
        timeline_(timeline),
        finite_(rank, config.check_finite != 0, counters.nonfinite) {}

  // Executes the batches of one round and finishes its entries, each once all its tensors are done.
  // A failed status is final for the backend; entries that are not finished yet stay with the
  // caller, in `round` (finished ones are reset to null there).
  Status run(std::vector<Agreed>& round);
  // The rounds from here on use these settings.
  void tune(const Tunables& tunables) {
    threshold_ = tunables.fusion_threshold;
    backend_.tune(tunables);
  }

 private:
  // Who takes part in a batch: the members of its process set that have not joined.
  struct Members {
    Group group;
    Presence present;  // of the set
  };
  const Members& members_of(const Batch& batch, const Agreed& agreed);
  // Opens the data plane of the batch's GPU tensors, if there are any, and puts it in order after
  // their producers. A status that is not sticky is the same on every member.
  Status open_gpu(const Batch& batch, const std::vector<Agreed>& round, const Members& members);
  // Marks the end of the batch on its GPU.
  Status close_gpu(const Batch& batch, const std::vector<Agreed>& round);
  void fail_batch(const Batch& batch, std::vector<Agreed>& round, const Status& why);
  Backend& plane_of(const TensorShape& tensor) const {
    return tensor.device == DeviceType::kHost ? backend_ : *gpu_;
  }
  // Makes room for the entry's next result, on the device of its tensor.
  Result<std::byte*> add_output(const Entry& entry, DeviceType device, std::size_t bytes);
  Status run_batch(const Batch& batch, std::vector<Agreed>& round, const Members& members);
  Status allreduce(const Batch& batch, const std::vector<Agreed>& round, const Group& group);
  // Looks at what this rank gives to an all-reduce, on the host before it does, on a GPU as it
  // does.
  Status check_finite(const Batch& batch, const std::vector<Agreed>& round);
  Status sum_weights(const Batch& batch, const std::vector<Agreed>& round, const Group& group);
  Status allgather(const Agreed& agreed, const Members& members);
  Status reducescatter(const Agreed& agreed, const Group& group);
  Status alltoall(const Agreed& agreed, const Members& members);
  Status broadcast(const Agreed& agreed, const Group& group);
  Status change_sets(const Agreed& agreed);
  Patience patience() const { return patience_of(config_.collective_timeout); }

  const int rank_;
  Backend& backend_;
  GpuPlane& gpus_;
  ProcessSets& sets_;
  const Config& config_;
  std::int64_t threshold_;
  TensorQueue& queue_;
  Counters& counters_;
  Timeline& timeline_;
  FiniteCheck finite_;
  FiniteWord unread_;  // of the current batch, where it has GPU tensors that are looked at
  std::map<std::uint32_t, Members> members_;  // by process set, as of its last batch
  DeviceBackend* gpu_ = nullptr;              // of the current batch, where it has GPU tensors
  std::vector<Piece> pieces_;                 // of the current batch; kept for its capacity
  std::vector<double> weights_;               // of the current batch, by tensor; then their sums
  std::vector<std::byte> zeros_;              // what a rank of weight 0 gives
};

}  // namespace hvdlite
