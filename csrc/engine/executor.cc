#include "engine/executor.h"

#include <new>
#include <numeric>

namespace hvdlite {
namespace {

std::span<const std::byte> bytes_of(const void* data, std::uint64_t count) {
  return {static_cast<const std::byte*>(data), count};
}

// What rank `from` gave to an allgather, in bytes: its first dimension times the rest of the shape.
std::uint64_t block_bytes(const TensorShape& tensor, std::int64_t first_dimension) {
  std::uint64_t bytes = size_of(tensor.dtype) * static_cast<std::uint64_t>(first_dimension);
  for (std::size_t i = 1; i < tensor.dims.size(); ++i) {
    bytes *= static_cast<std::uint64_t>(tensor.dims[i]);
  }
  return bytes;
}

}  // namespace

Status Executor::run(std::vector<Agreed>& round) {
  const auto threshold = static_cast<std::uint64_t>(config_.fusion_threshold);
  std::vector<std::size_t> left(round.size());
  for (std::size_t i = 0; i < round.size(); ++i) {
    left[i] = std::max<std::size_t>(round[i].entry->request.tensors.size(), 1);
  }
  for (const Batch& batch : plan_batches(round, threshold)) {
    HVDLITE_RETURN_IF_ERROR(run_batch(batch, round));
    ++counters_.batches;
    counters_.bytes += batch.bytes;
    for (const TensorRef& ref : batch.tensors) {
      ++counters_.tensors;
      if (--left[ref.agreed] > 0) continue;
      queue_.finish(round[ref.agreed].entry, Status());
      round[ref.agreed].entry = nullptr;
    }
  }
  return Status();
}

Status Executor::run_batch(const Batch& batch, std::vector<Agreed>& round) {
  const Timeline::BatchScope traced(timeline_, batch, round, counters_.batches.get());
  const Group& group = *sets_.get(batch.process_set);
  Agreed& first = round[batch.tensors[0].agreed];
  switch (batch.kind) {
    case Kind::kAllreduce:
      return allreduce(batch, round, group);
    case Kind::kAllgather:
      return allgather(first, group);
    case Kind::kBroadcast:
      return broadcast(first, group);
    case Kind::kBarrier:
      return backend_.barrier(group, patience());
  }
  return Status(StatusCode::kInternal, "a collective of unknown kind");
}

Status Executor::allreduce(const Batch& batch, const std::vector<Agreed>& round,
                           const Group& group) {
  if (batch.weighted) HVDLITE_RETURN_IF_ERROR(sum_weights(batch, round, group));
  pieces_.clear();
  for (std::size_t i = 0; i < batch.tensors.size(); ++i) {
    const TensorRef& ref = batch.tensors[i];
    const Entry& entry = *round[ref.agreed].entry;
    pieces_.push_back({entry.inputs[ref.tensor], entry.outputs[ref.tensor],
                       entry.request.tensors[ref.tensor].count(), entry.request.prescale,
                       entry.request.postscale});
    if (!batch.weighted) continue;
    // The share is applied on the way in: weight * x alone could overflow a 16-bit type.
    if (entry.weight == 0) pieces_.back().input = zeros_.data();
    pieces_.back().prescale *= weights_[i] == 0 ? 0 : entry.weight / weights_[i];
  }
  const ReduceOp op = batch.weighted ? ReduceOp::kSum : batch.op;
  return backend_.allreduce(group, batch.dtype, op, pieces_, patience());
}

Status Executor::sum_weights(const Batch& batch, const std::vector<Agreed>& round,
                             const Group& group) {
  weights_.clear();
  for (const TensorRef& ref : batch.tensors) {
    const Entry& entry = *round[ref.agreed].entry;
    weights_.push_back(entry.weight);
    const std::uint64_t bytes = entry.request.tensors[ref.tensor].bytes();
    if (entry.weight == 0 && zeros_.size() < bytes) zeros_.resize(bytes);
  }
  const Piece piece{weights_.data(), weights_.data(), weights_.size(), 1.0, 1.0};
  return backend_.allreduce(group, DataType::kFloat64, ReduceOp::kSum, {&piece, 1}, patience());
}

Status Executor::allgather(Agreed& agreed, const Group& group) {
  const Entry& entry = *agreed.entry;
  const TensorShape& tensor = entry.request.tensors[0];
  std::vector<std::size_t> bytes;
  for (const std::int64_t dim : agreed.first_dimensions) bytes.push_back(block_bytes(tensor, dim));
  const std::size_t total = std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
  Completion::Output& output = entry.completion->output;
  output.data.reset(new (std::nothrow) std::byte[total]);
  if (output.data == nullptr) {
    // The peers are in the collective already: without this rank it cannot end well for anybody.
    return Status(StatusCode::kInternal, describe(entry.request) + ": no memory for the " +
                                             std::to_string(total) +
                                             " bytes of its result on this rank");
  }
  output.bytes = total;
  entry.completion->first_dimensions = agreed.first_dimensions;
  return backend_.allgather(group, bytes_of(entry.inputs[0], tensor.bytes()), bytes,
                            {output.data.get(), total}, patience());
}

Status Executor::broadcast(const Agreed& agreed, const Group& group) {
  const Entry& entry = *agreed.entry;
  for (std::size_t i = 0; i < entry.request.tensors.size(); ++i) {
    const std::uint64_t bytes = entry.request.tensors[i].bytes();
    HVDLITE_RETURN_IF_ERROR(
        backend_.broadcast(group, entry.request.root, bytes_of(entry.inputs[i], bytes),
                           {static_cast<std::byte*>(entry.outputs[i]), bytes}, patience()));
  }
  return Status();
}

}  // namespace hvdlite
