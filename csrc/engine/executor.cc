#include "engine/executor.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <map>
#include <tuple>

#include "engine/entry.h"
#include "host/silence.h"

namespace hvdlite {

Status Executor::run(std::vector<Agreed>& round) {
  std::vector<std::size_t> left(round.size());
  for (std::size_t i = 0; i < round.size(); ++i) {
    left[i] = std::max<std::size_t>(round[i].entry->request.tensors.size(), 1);
  }
  for (Batch& batch : plan_batches(round, static_cast<std::uint64_t>(threshold_))) {
    // What failed with an earlier batch failed so on every member.
    std::erase_if(batch.tensors, [&](const TensorRef& ref) { return !round[ref.agreed].entry; });
    if (batch.tensors.empty()) continue;
    batch_ = &batch;
    round_ = &round;
    members_ = &members_of(batch);
    gpu_ = nullptr;
    const Status opened = open();
    if (!opened.ok() && !opened.sticky()) {
      fail_batch(opened);
      continue;
    }
    HVDLITE_RETURN_IF_ERROR(opened);
    if (parts_.commits != nullptr) {
      HVDLITE_RETURN_IF_ERROR(kept_.keep(batch, round, *parts_.backend, gpu_));
    }
    const auto begun = LiveFigures::Clock::now();
    HVDLITE_RETURN_IF_ERROR(execute());
    HVDLITE_RETURN_IF_ERROR(close());
    note_end(begun);
    finish_batch(left);
  }
  return parts_.commits == nullptr ? Status() : commit();
}

const Executor::Members& Executor::members_of(const Batch& batch) {
  const auto [at, is_new] = last_members_.try_emplace(batch.process_set);
  Members& members = at->second;
  if (!is_new && members.group.generation == batch.generation) return members;
  const Group& whole = *parts_.sets.get(batch.process_set);
  const std::vector<int>& absent = first().absent;
  members = {{whole.id, {}, whole.lane, batch.generation}, {}};
  for (const int rank : whole.ranks) {
    members.present.push_back(!std::binary_search(absent.begin(), absent.end(), rank));
    if (members.present.back()) members.group.ranks.push_back(rank);
  }
  if (parts_.config.average_over_joined != 0 && !absent.empty()) {
    members.group.average_over = static_cast<int>(whole.ranks.size());
  }
  return members;
}

void Executor::note_end(LiveFigures::Clock::time_point begun) {
  if (batch_->kind != Kind::kAllreduce) return;
  const auto counts = [&](const TensorRef& ref) {
    return (*round_)[ref.agreed].entry->request.of_a_step();
  };
  if (!std::any_of(batch_->tensors.begin(), batch_->tensors.end(), counts)) return;
  const auto now = LiveFigures::Clock::now();
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(now - begun);
  parts_.counters.exchange_us += static_cast<std::uint64_t>(took.count());
  if (parts_.rank == 0) parts_.live.steps.ended(now);
}

void Executor::finish_batch(std::vector<std::size_t>& left) {
  ++parts_.counters.batches;
  // A rank may join, or only see process sets of others, before it gives a tensor to anything.
  const bool gives = batch_->kind != Kind::kBroadcast && batch_->kind != Kind::kBarrier;
  if (gives) ++parts_.counters.exchanges;
  parts_.counters.bytes += batch_->bytes;
  for (const TensorRef& ref : batch_->tensors) {
    ++parts_.counters.tensors;
    if (--left[ref.agreed] > 0) continue;
    Agreed& agreed = (*round_)[ref.agreed];
    if (batch_->kind == Kind::kRemoveProcessSet) {
      last_members_.erase(static_cast<std::uint32_t>(agreed.set_id));
    }
    agreed.entry->completion->members = members_->group.divisor();
    agreed.entry->completion->epoch = parts_.epoch;
    if (parts_.commits != nullptr) {
      parts_.commits->hold(agreed.entry, members_->group);
    } else {
      parts_.queue.finish(agreed.entry, Status());
    }
    agreed.entry = nullptr;
  }
}

void Executor::fail_batch(const Status& why) {
  for (const TensorRef& ref : batch_->tensors) {
    EntryPtr& entry = (*round_)[ref.agreed].entry;
    if (entry == nullptr) continue;
    parts_.queue.finish(entry, of_call(entry->request, why));
    entry = nullptr;
  }
}

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

Status Executor::open() {
  const Entry* last = nullptr;
  for (const TensorRef& ref : batch_->tensors) {
    const Entry& entry = entry_of(ref);
    if (!on_gpu(entry.request, ref) || &entry == last) continue;
    if (gpu_ == nullptr) {
      HVDLITE_ASSIGN_OR_RETURN(gpu_, parts_.gpus.open(members_->group, entry.gpu->ordinal,
                                                      patience_, !first().absent.empty()));
    }
    HVDLITE_RETURN_IF_ERROR(as_fatal(gpu_->after_events({&entry.gpu->ready, 1})));
    last = &entry;
  }
  return Status();
}

Status Executor::execute() {
  const Timeline::BatchScope traced(parts_.timeline, *batch_, *round_,
                                    parts_.counters.batches.get(),
                                    gpu_ == nullptr ? nullptr : &gpu_->device());
  return gpu_ == nullptr ? execute_kind() : as_fatal(execute_kind());
}

Status Executor::execute_kind() {
  switch (batch_->kind) {
    case Kind::kAllreduce:
      return allreduce();
    case Kind::kAllgather:
      return allgather();
    case Kind::kBroadcast:
      return broadcast();
    case Kind::kBarrier:
      return parts_.backend->barrier(members_->group, patience_);
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

Status Executor::change_sets() {
  const int id = first().set_id;
  const Entry& entry = *first().entry;
  if (batch_->kind == Kind::kAddProcessSet) {
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

void Executor::note_change(const Group& group, const std::string& what) {
  if (parts_.rank > 0) return;  // all ranks know of it
  const std::string name = describe(group);
  parts_.live.events.add("process set", -1, name, name + " was " + what);
}

Status Executor::allreduce() {
  if (batch_->weighted) HVDLITE_RETURN_IF_ERROR(sum_weights());
  std::vector<Piece>& pieces = pieces_;
  pieces.clear();
  for (std::size_t i = 0; i < batch_->tensors.size(); ++i) {
    const TensorRef& ref = batch_->tensors[i];
    const Entry& entry = entry_of(ref);
    pieces.push_back({entry.inputs[ref.tensor], entry.outputs[ref.tensor],
                      entry.request.tensors[ref.tensor].count(), entry.request.prescale,
                      entry.request.postscale});
    pieces.back().copy = KeptInputs::copy_of(*(*round_)[ref.agreed].entry, ref.tensor);
    if (!batch_->weighted) continue;
    pieces.back().own_scale = true;
    // The share is applied on the way in: weight * x alone could overflow a 16-bit type.
    if (entry.weight == 0) {
      pieces.back().input = batch_->device == DeviceType::kHost ? zeros_.data() : nullptr;
    }
    pieces.back().prescale *= weights_[i] == 0 ? 0 : entry.weight / weights_[i];
  }
  const ReduceOp op = batch_->weighted ? ReduceOp::kSum : batch_->op;
  return plane_of(batch_->device)
      .allreduce({members_->group, batch_->types, op, pieces}, patience_);
}

Status Executor::sum_weights() {
  std::vector<double>& weights = weights_;
  weights.clear();
  for (const TensorRef& ref : batch_->tensors) {
    const Entry& entry = entry_of(ref);
    weights.push_back(entry.weight);
    const std::uint64_t bytes = entry.request.tensors[ref.tensor].bytes();
    const bool host = batch_->device == DeviceType::kHost;
    if (host && entry.weight == 0 && zeros_.size() < bytes) zeros_.resize(bytes);
  }
  const Piece piece{weights.data(), weights.data(), weights.size(), 1.0, 1.0};
  return parts_.backend->allreduce(
      {members_->group, DataType::kFloat64, ReduceOp::kSum, {&piece, 1}}, patience_);
}

Status Executor::close() {
  if (gpu_ == nullptr) return Status();
  const Result<CudaEventPtr> end = gpu_->record();
  HVDLITE_RETURN_IF_ERROR(as_fatal(end.status()));
  for (const TensorRef& ref : batch_->tensors) {
    const Entry& entry = entry_of(ref);
    // One stream: what the entry has on it already ends earlier.
    if (on_gpu(entry.request, ref)) entry.completion->on_device = end.value();
  }
  parts_.gpus.track(end.value());
  return Status();
}

// The commits of an elastic job, see commit_book.h.
namespace {

// Between two looks at a device. Nothing rings when it has come to an event.
constexpr auto kDeviceInterval = std::chrono::microseconds(50);

}  // namespace

Status Executor::commit() {
  CommitBook& book = *parts_.commits;
  book.end_round();
  for (const std::uint32_t set : book.due_sets()) {
    const Group& group = book.group(set);
    HVDLITE_RETURN_IF_ERROR(await_device(book.due(set), group));
    HVDLITE_RETURN_IF_ERROR(
        parts_.backend->barrier(group, patience_of(parts_.config.collective_timeout)));
    for (const EntryPtr& entry : book.complete(set)) {
      if (entry->request.kind == Kind::kRemoveProcessSet) drop_set(entry->removes);
      kept_.release(*entry);
      parts_.queue.finish(entry, Status());
    }
  }
  return Status();
}

void Executor::drop_set(std::uint32_t set) {
  for (const EntryPtr& entry : parts_.commits->drop(set)) {
    kept_.release(*entry);
    parts_.queue.finish(
        entry, invalid_call(entry->request, "its process set was removed before transaction '" +
                                                entry->request.transaction + "' was committed"));
  }
}

Status Executor::await_device(const std::vector<EntryPtr>& entries, const Group& group) {
  const auto ready = [&] {
    return std::all_of(entries.begin(), entries.end(), [](const EntryPtr& entry) {
      const CudaEventPtr& end = entry->completion->on_device;
      return end == nullptr || end->reached();
    });
  };
  if (ready()) return Status();
  Waiter& waiter = *parts_.fabric->waiter;
  const auto failed = [&] {
    for (const int rank : group.ranks) {
      if (rank != parts_.rank && waiter.lost(rank)) return lost_peer(rank, "a commit");
    }
    return parts_.gpus.poll();
  };
  while (true) {
    const Status status = waiter.wait(ready, failed, Deadline::after(kDeviceInterval));
    if (status.code() != StatusCode::kTimeout || !status.message().empty()) return status;
  }
}

namespace {

// Looking for room stays cheap, however many tensors do not fit where others went.
constexpr std::size_t kMostOpen = 16;

ElementTypes types_of(const TensorShape& tensor) {
  if (tensor.dtype == DataType::kBool) return reduced_as(tensor.dtype);
  return ElementTypes(tensor.dtype, tensor.wire);
}

// What the tensors of a batch have in common. By Adasum those of one entry keep to themselves.
using Likeness = std::tuple<DataType, DataType, DeviceType, ReduceOp, bool, std::uint32_t,
                            std::uint32_t, std::size_t>;

Likeness likeness_of(const Agreed& agreed, std::size_t index, const TensorShape& tensor) {
  const Request& request = agreed.entry->request;
  const std::size_t alone = request.op == ReduceOp::kAdasum ? index + 1 : 0;
  return {tensor.dtype,     tensor.wire,         tensor.device,     request.op,
          request.weighted, request.process_set, agreed.generation, alone};
}

Batch make_batch(const Agreed& agreed, ElementTypes types, DeviceType device) {
  const Request& request = agreed.entry->request;
  Batch batch;
  batch.kind = request.kind;
  batch.types = types;
  batch.device = device;
  batch.op = request.op;
  batch.weighted = request.weighted;
  batch.process_set = request.process_set;
  batch.generation = agreed.generation;
  return batch;
}

void add_send(std::vector<Batch>& batches, const Agreed& agreed, std::size_t index) {
  const std::vector<TensorShape>& tensors = agreed.entry->request.tensors;
  const bool follows = !batches.empty() && batches.back().kind == Kind::kSend &&
                       batches.back().tensors.back().agreed + 1 == index;
  if (!follows) batches.push_back(make_batch(agreed, DataType::kUint8, DeviceType::kHost));
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    batches.back().bytes += tensors[t].wire_bytes();
    batches.back().tensors.push_back({index, t});
  }
}

}  // namespace

std::vector<Batch> plan_batches(const std::vector<Agreed>& round, std::uint64_t threshold) {
  std::vector<Batch> batches;
  // These may have room; the oldest comes first.
  std::map<Likeness, std::vector<std::size_t>> open_batches;
  for (std::size_t i = 0; i < round.size(); ++i) {
    const Request& request = round[i].entry->request;
    if (request.is_send()) {
      add_send(batches, round[i], i);
      continue;
    }
    if (request.kind != Kind::kAllreduce) {
      batches.push_back(make_batch(round[i], DataType::kUint8, DeviceType::kHost));
      for (std::size_t t = 0; t < request.tensors.size(); ++t) {
        batches.back().tensors.push_back({i, t});
      }
      if (request.tensors.empty()) batches.back().tensors.push_back({i, 0});
      continue;
    }
    for (std::size_t t = 0; t < request.tensors.size(); ++t) {
      const TensorShape& tensor = request.tensors[t];
      std::vector<std::size_t>& open = open_batches[likeness_of(round[i], i, tensor)];
      const auto has_room = [&](std::size_t batch) {
        return request.op == ReduceOp::kAdasum ||
               batches[batch].bytes + tensor.wire_bytes() <= threshold;
      };
      auto home = std::find_if(open.rbegin(), open.rend(), has_room);
      if (home == open.rend()) {
        if (open.size() == kMostOpen) open.erase(open.begin());
        open.push_back(batches.size());
        batches.push_back(make_batch(round[i], types_of(tensor), tensor.device));
        batches.back().op = reduced_by(tensor.dtype, request.op);
        home = open.rbegin();
      }
      Batch& batch = batches[*home];
      batch.bytes += tensor.wire_bytes();
      batch.tensors.push_back({i, t});
      const bool full = request.op != ReduceOp::kAdasum && batch.bytes >= threshold;
      if (full) open.erase(std::next(home).base());
    }
  }
  return batches;
}

}  // namespace hvdlite
