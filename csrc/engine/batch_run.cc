#include "engine/batch_run.h"

namespace hvdlite {
namespace {

bool on_gpu(const Request& request, const TensorRef& ref) {
  return ref.tensor < request.tensors.size() &&
         request.tensors[ref.tensor].device == DeviceType::kGpu;
}

// After the negotiation the peers are committed to the collective, so any error ends the world.
Status as_fatal(const Status& status) {
  if (status.ok() || status.sticky()) return status;
  return Status(StatusCode::kInternal, status.message(), status.failed_rank());
}

}  // namespace

Status BatchRun::open() {
  const Entry* last = nullptr;
  for (const TensorRef& ref : batch_.tensors) {
    const Entry& entry = entry_of(ref);
    if (!on_gpu(entry.request, ref) || &entry == last) continue;
    if (gpu_ == nullptr) {
      const Result<DeviceBackend*> plane =
          parts_.gpus.open(members_.group, entry.gpu->ordinal, patience_, !first().absent.empty());
      HVDLITE_RETURN_IF_ERROR(plane.status());
      gpu_ = plane.value();
    }
    HVDLITE_RETURN_IF_ERROR(as_fatal(gpu_->after_events({&entry.gpu->ready, 1})));
    last = &entry;
  }
  return Status();
}

Status BatchRun::execute() {
  const Timeline::BatchScope traced(parts_.timeline, batch_, round_, parts_.counters.batches.get(),
                                    gpu_ == nullptr ? nullptr : &gpu_->device());
  return gpu_ == nullptr ? execute_kind() : as_fatal(execute_kind());
}

Status BatchRun::execute_kind() {
  switch (batch_.kind) {
    case Kind::kAllreduce:
      return allreduce();
    case Kind::kAllgather:
      return allgather();
    case Kind::kBroadcast:
      return broadcast();
    case Kind::kBarrier:
      return parts_.backend->barrier(members_.group, patience_);
    case Kind::kAlltoall:
      return alltoall();
    case Kind::kReducescatter:
      return reducescatter();
    case Kind::kSend:
      return send();
    case Kind::kJoin:
      parts_.gpus.forget_parts();
      first().entry->completion->last_joined = first().last_joined;
      return Status();
    case Kind::kCommit:
      return Status();  // the executor commits behind the round
    case Kind::kAddProcessSet:
    case Kind::kRemoveProcessSet:
      return change_sets();
  }
  return Status(StatusCode::kInternal, "a collective of unknown kind");
}

Status BatchRun::change_sets() {
  const int id = first().set_id;
  const Entry& entry = *first().entry;
  if (batch_.kind == Kind::kAddProcessSet) {
    parts_.sets.add(id, {entry.request.ranks.begin(), entry.request.ranks.end()});
    entry.completion->set_id = id;
    note_change(*parts_.sets.get(static_cast<std::uint32_t>(id)), "added");
  } else {
    const GroupPtr group = parts_.sets.get(static_cast<std::uint32_t>(id));
    parts_.gpus.forget(*group);
    parts_.backend->forget(*group);
    parts_.sets.remove(id);
    note_change(*group, "removed");
  }
  return Status();
}

void BatchRun::note_change(const Group& group, const std::string& what) {
  if (parts_.rank > 0) return;  // all ranks know of it
  const std::string name = describe(group);
  parts_.live.events.add("process set", -1, name, name + " was " + what);
}

Status BatchRun::allreduce() {
  if (batch_.weighted) HVDLITE_RETURN_IF_ERROR(sum_weights());
  std::vector<Piece>& pieces = buffers_.pieces;
  pieces.clear();
  for (std::size_t i = 0; i < batch_.tensors.size(); ++i) {
    const TensorRef& ref = batch_.tensors[i];
    const Entry& entry = entry_of(ref);
    pieces.push_back({entry.inputs[ref.tensor], entry.outputs[ref.tensor],
                      entry.request.tensors[ref.tensor].count(), entry.request.prescale,
                      entry.request.postscale});
    pieces.back().copy = KeptInputs::copy_of(*round_[ref.agreed].entry, ref.tensor);
    if (!batch_.weighted) continue;
    pieces.back().own_scale = true;
    // The share is applied on the way in: weight * x alone could overflow a 16-bit type.
    if (entry.weight == 0) {
      pieces.back().input = batch_.device == DeviceType::kHost ? buffers_.zeros.data() : nullptr;
    }
    pieces.back().prescale *= buffers_.weights[i] == 0 ? 0 : entry.weight / buffers_.weights[i];
  }
  const ReduceOp op = batch_.weighted ? ReduceOp::kSum : batch_.op;
  return plane_of(batch_.device).allreduce({members_.group, batch_.types, op, pieces}, patience_);
}

Status BatchRun::sum_weights() {
  std::vector<double>& weights = buffers_.weights;
  weights.clear();
  for (const TensorRef& ref : batch_.tensors) {
    const Entry& entry = entry_of(ref);
    weights.push_back(entry.weight);
    const std::uint64_t bytes = entry.request.tensors[ref.tensor].bytes();
    const bool host = batch_.device == DeviceType::kHost;
    if (host && entry.weight == 0 && buffers_.zeros.size() < bytes) buffers_.zeros.resize(bytes);
  }
  const Piece piece{weights.data(), weights.data(), weights.size(), 1.0, 1.0};
  return parts_.backend->allreduce(
      {members_.group, DataType::kFloat64, ReduceOp::kSum, {&piece, 1}}, patience_);
}

Status BatchRun::close() {
  if (gpu_ == nullptr) return Status();
  const Result<CudaEventPtr> end = gpu_->record();
  HVDLITE_RETURN_IF_ERROR(as_fatal(end.status()));
  for (const TensorRef& ref : batch_.tensors) {
    const Entry& entry = entry_of(ref);
    // One stream: what the entry has on it already ends earlier.
    if (on_gpu(entry.request, ref)) entry.completion->on_device = end.value();
  }
  parts_.gpus.track(end.value());
  return Status();
}

}  // namespace hvdlite
