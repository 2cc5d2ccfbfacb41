#include "engine/fusion_plan.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>

namespace hvdlite {
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
