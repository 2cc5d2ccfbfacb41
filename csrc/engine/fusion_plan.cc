#include "engine/fusion_plan.h"

namespace hvdlite {
namespace {

ElementTypes types_of(const TensorShape& tensor) { return {tensor.dtype, tensor.wire}; }

bool may_share(const Batch& batch, const std::vector<Agreed>& round, std::size_t index,
               const TensorShape& tensor, std::uint64_t threshold) {
  const Agreed& agreed = round[index];
  const Request& request = agreed.entry->request;
  const bool fits = request.op == ReduceOp::kAdasum
                        ? batch.tensors.back().agreed == index
                        : batch.bytes + tensor.wire_bytes() <= threshold;
  return fits && batch.kind == Kind::kAllreduce && batch.types == types_of(tensor) &&
         batch.device == tensor.device && batch.op == request.op &&
         batch.weighted == request.weighted && batch.process_set == request.process_set &&
         batch.generation == agreed.generation;
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

}  // namespace

std::vector<Batch> plan_batches(const std::vector<Agreed>& round, std::uint64_t threshold) {
  std::vector<Batch> batches;
  for (std::size_t i = 0; i < round.size(); ++i) {
    const Request& request = round[i].entry->request;
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
      Batch* home = nullptr;
      for (auto batch = batches.rbegin(); batch != batches.rend() && home == nullptr; ++batch) {
        if (may_share(*batch, round, i, tensor, threshold)) home = &*batch;
      }
      if (home == nullptr) {
        home = &batches.emplace_back(make_batch(round[i], types_of(tensor), tensor.device));
      }
      home->bytes += tensor.wire_bytes();
      home->tensors.push_back({i, t});
    }
  }
  return batches;
}

}  // namespace hvdlite
