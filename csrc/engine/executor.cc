#include "engine/executor.h"

#include <algorithm>

namespace hvdlite {
namespace {

bool on_gpu(const Request& request, const TensorRef& ref) {
  return ref.tensor < request.tensors.size() &&
         request.tensors[ref.tensor].device == DeviceType::kGpu;
}

const std::string& tensor_name(const Entry& entry, const TensorRef& ref) {
  const std::string& own = entry.request.tensors[ref.tensor].name;
  return own.empty() ? entry.request.name : own;
}

// For what goes wrong after the members have agreed: they are in the collective, or will be.
Status made_final(const Status& status) {
  if (status.ok() || status.sticky()) return status;
  return Status(StatusCode::kInternal, status.message(), status.failed_rank());
}

}  // namespace

Status Executor::run(std::vector<Agreed>& round) {
  const auto threshold = static_cast<std::uint64_t>(threshold_);
  std::vector<std::size_t> left(round.size());
  for (std::size_t i = 0; i < round.size(); ++i) {
    left[i] = std::max<std::size_t>(round[i].entry->request.tensors.size(), 1);
  }
  for (Batch& batch : plan_batches(round, threshold)) {
    // What failed with an earlier batch failed so on every member.
    std::erase_if(batch.tensors, [&](const TensorRef& ref) { return !round[ref.agreed].entry; });
    if (batch.tensors.empty()) continue;
    const Members& members = members_of(batch, round[batch.tensors[0].agreed]);
    const Status opened = open_gpu(batch, round, members);
    if (!opened.ok() && !opened.sticky()) {
      fail_batch(batch, round, opened);
      continue;
    }
    HVDLITE_RETURN_IF_ERROR(opened);
    HVDLITE_RETURN_IF_ERROR(gpu_ == nullptr ? run_batch(batch, round, members)
                                            : made_final(run_batch(batch, round, members)));
    HVDLITE_RETURN_IF_ERROR(made_final(close_gpu(batch, round)));
    ++counters_.batches;
    counters_.bytes += batch.bytes;
    for (const TensorRef& ref : batch.tensors) {
      ++counters_.tensors;
      if (--left[ref.agreed] > 0) continue;
      round[ref.agreed].entry->completion->members = members.group.divisor();
      queue_.finish(round[ref.agreed].entry, Status());
      round[ref.agreed].entry = nullptr;
    }
  }
  return Status();
}

const Executor::Members& Executor::members_of(const Batch& batch, const Agreed& agreed) {
  const auto [at, is_new] = members_.try_emplace(batch.process_set);
  Members& members = at->second;
  if (!is_new && members.group.generation == batch.generation) return members;
  const Group& whole = *sets_.get(batch.process_set);
  const std::vector<int>& absent = agreed.absent;
  members = {{whole.id, {}, whole.lane, batch.generation}, {}};
  for (const int rank : whole.ranks) {
    members.present.push_back(!std::binary_search(absent.begin(), absent.end(), rank));
    if (members.present.back()) members.group.ranks.push_back(rank);
  }
  if (config_.average_over_joined != 0 && !absent.empty()) {
    members.group.average_over = static_cast<int>(whole.ranks.size());
  }
  return members;
}

Status Executor::open_gpu(const Batch& batch, const std::vector<Agreed>& round,
                          const Members& members) {
  gpu_ = nullptr;
  const Entry* last = nullptr;
  for (const TensorRef& ref : batch.tensors) {
    const Entry& entry = *round[ref.agreed].entry;
    if (!on_gpu(entry.request, ref) || &entry == last) continue;
    if (gpu_ == nullptr) {
      const Result<DeviceBackend*> plane = gpus_.open(members.group, entry.gpu->ordinal, patience(),
                                                      !round[ref.agreed].absent.empty());
      HVDLITE_RETURN_IF_ERROR(plane.status());
      gpu_ = plane.value();
    }
    HVDLITE_RETURN_IF_ERROR(made_final(gpu_->after_events({&entry.gpu->ready, 1})));
    last = &entry;
  }
  return Status();
}

Status Executor::close_gpu(const Batch& batch, const std::vector<Agreed>& round) {
  if (gpu_ == nullptr) return Status();
  const Result<CudaEventPtr> end = gpu_->record();
  HVDLITE_RETURN_IF_ERROR(end.status());
  for (const TensorRef& ref : batch.tensors) {
    const Entry& entry = *round[ref.agreed].entry;
    // One stream: what the entry has on it already ends earlier.
    if (on_gpu(entry.request, ref)) entry.completion->on_device = end.value();
  }
  if (unread_ == nullptr) {
    gpus_.track(end.value());
    return Status();
  }
  NameList names;
  for (const TensorRef& ref : batch.tensors) {
    names.add("'" + tensor_name(*round[ref.agreed].entry, ref) + "'");
  }
  gpus_.track(end.value(), [this, names = std::move(names), word = std::move(unread_)] {
    if (*word == 0) return;
    finite_.found_in(names);
    finite_.report();
  });
  unread_ = nullptr;
  return Status();
}

void Executor::fail_batch(const Batch& batch, std::vector<Agreed>& round, const Status& why) {
  for (const TensorRef& ref : batch.tensors) {
    EntryPtr& entry = round[ref.agreed].entry;
    if (entry == nullptr) continue;
    queue_.finish(entry, Status(why.code(), describe(entry->request) + ": " + why.message(),
                                why.failed_rank()));
    entry = nullptr;
  }
}

Status Executor::run_batch(const Batch& batch, std::vector<Agreed>& round, const Members& members) {
  const Timeline::BatchScope traced(timeline_, batch, round, counters_.batches.get(),
                                    gpu_ == nullptr ? nullptr : &gpu_->device());
  const Group& group = members.group;
  const Agreed& first = round[batch.tensors[0].agreed];
  switch (batch.kind) {
    case Kind::kAllreduce:
      return allreduce(batch, round, group);
    case Kind::kAllgather:
      return allgather(first, members);
    case Kind::kBroadcast:
      return broadcast(first, group);
    case Kind::kBarrier:
      return backend_.barrier(group, patience());
    case Kind::kAlltoall:
      return alltoall(first, members);
    case Kind::kReducescatter:
      return reducescatter(first, group);
    case Kind::kJoin:
      gpus_.forget_parts();
      first.entry->completion->first_dimensions = first.first_dimensions;
      return Status();
    case Kind::kAddProcessSet:
    case Kind::kRemoveProcessSet:
      return change_sets(first);
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
    pieces_.back().own_scale = true;
    // The share is applied on the way in: weight * x alone could overflow a 16-bit type.
    if (entry.weight == 0) {
      pieces_.back().input = batch.device == DeviceType::kHost ? zeros_.data() : nullptr;
    }
    pieces_.back().prescale *= weights_[i] == 0 ? 0 : entry.weight / weights_[i];
  }
  if (finite_.on() && !is_integer(batch.types.memory)) {
    HVDLITE_RETURN_IF_ERROR(check_finite(batch, round));
  }
  const ReduceOp op = batch.weighted ? ReduceOp::kSum : batch.op;
  Backend& plane = batch.device == DeviceType::kHost ? backend_ : *gpu_;
  return plane.allreduce(group, batch.types, op, pieces_, patience());
}

Status Executor::check_finite(const Batch& batch, const std::vector<Agreed>& round) {
  if (batch.device == DeviceType::kGpu) {
    Result<FiniteWord> word = gpu_->look_for_nonfinite();
    HVDLITE_RETURN_IF_ERROR(word.status());
    unread_ = std::move(word.value());
    return Status();
  }
  for (std::size_t i = 0; i < batch.tensors.size(); ++i) {
    const TensorRef& ref = batch.tensors[i];
    const Entry& entry = *round[ref.agreed].entry;
    if (entry.weight != 0) finite_.look(tensor_name(entry, ref), batch.types, pieces_[i]);
  }
  finite_.report();
  return Status();
}

Status Executor::sum_weights(const Batch& batch, const std::vector<Agreed>& round,
                             const Group& group) {
  weights_.clear();
  for (const TensorRef& ref : batch.tensors) {
    const Entry& entry = *round[ref.agreed].entry;
    weights_.push_back(entry.weight);
    const std::uint64_t bytes = entry.request.tensors[ref.tensor].bytes();
    const bool host = batch.device == DeviceType::kHost;
    if (host && entry.weight == 0 && zeros_.size() < bytes) zeros_.resize(bytes);
  }
  const Piece piece{weights_.data(), weights_.data(), weights_.size(), 1.0, 1.0};
  return backend_.allreduce(group, DataType::kFloat64, ReduceOp::kSum, {&piece, 1}, patience());
}

Status Executor::change_sets(const Agreed& agreed) {
  const Request& request = agreed.entry->request;
  const auto id = static_cast<int>(agreed.first_dimensions.at(0));
  if (request.kind == Kind::kAddProcessSet) {
    sets_.add(id, {request.splits.begin(), request.splits.end()});
    agreed.entry->completion->first_dimensions = {id};
  } else {
    const GroupPtr group = sets_.get(static_cast<std::uint32_t>(id));
    gpus_.forget(*group);
    backend_.forget(*group);
    sets_.remove(id);
    members_.erase(static_cast<std::uint32_t>(id));
  }
  return Status();
}

}  // namespace hvdlite
