#include "engine/core_table.h"

#include <cmath>
#include <memory>
#include <utility>

#include "engine/engine.h"
#include "os/fd.h"

namespace hvdlite {
namespace {

EntryPtr make_entry(const HvdliteCall& call) {
  auto entry = std::make_shared<Entry>();
  Request& request = entry->request;
  request.kind = static_cast<Kind>(call.kind);
  request.op = static_cast<ReduceOp>(call.op);
  request.root = call.root;
  request.process_set = call.process_set;
  request.prescale = call.prescale;
  request.postscale = call.postscale;
  request.weighted = !std::isnan(call.weight);
  request.name = call.name;
  request.splits.assign(call.splits, call.splits + call.split_count);
  entry->weight = request.weighted ? call.weight : 1.0;
  for (std::int32_t i = 0; i < call.count; ++i) {
    const HvdliteTensor& tensor = call.tensors[i];
    request.tensors.push_back({tensor.name,
                               static_cast<DataType>(tensor.dtype),
                               {tensor.dims, tensor.dims + tensor.ndim}});
    entry->inputs.push_back(tensor.input);
    entry->outputs.push_back(tensor.output);
  }
  return entry;
}

void report(const HvdliteCall& call, const Status& status, const Completion* completion) {
  HvdliteResult result{};
  result.code = static_cast<std::int32_t>(status.code());
  result.failed_rank = status.failed_rank();
  result.message = status.message().c_str();
  std::vector<HvdliteOutput> outputs;
  if (completion != nullptr && !completion->outputs.empty()) {
    for (const auto& output : completion->outputs) {
      outputs.push_back({output.data.get(), output.bytes});
    }
    result.first_dimensions = completion->first_dimensions.data();
    result.parts = static_cast<std::int32_t>(completion->first_dimensions.size() / outputs.size());
    result.count = static_cast<std::int32_t>(outputs.size());
    result.outputs = outputs.data();
  }
  call.done(call.context, &result);
}

Status check(const HvdliteCall& call) {
  HVDLITE_RETURN_IF_ERROR(check_not_forked());
  if (call.kind < 0 || call.kind > static_cast<int>(kLastKind)) {
    return Status(StatusCode::kInvalidArgument,
                  "kind " + std::to_string(call.kind) + " is unknown");
  }
  if (!is_valid_op(call.op)) {
    return Status(StatusCode::kInvalidArgument, "op " + std::to_string(call.op) + " is unknown");
  }
  return Status();
}

void submit(void* engine, const HvdliteCall* call) {
  Status status = check(*call);
  if (status.ok()) {
    const EntryPtr entry = make_entry(*call);
    // The continuation belongs to the completion, which the entry keeps until it has run.
    Completion* completion = entry->completion.get();
    completion->then(
        [call = *call, completion] { report(call, completion->status(), completion); });
    status = static_cast<Engine*>(engine)->enqueue(entry, /*blocking=*/false);
  }
  if (!status.ok()) report(*call, status, nullptr);
}

bool find(void* engine, std::uint32_t process_set, HvdlitePlace* place) {
  const auto* self = static_cast<const Engine*>(engine);
  const GroupPtr group = self->process_set(process_set);
  if (group == nullptr) return false;
  *place = {group->index_of(self->rank()), static_cast<std::int32_t>(group->ranks.size())};
  return true;
}

}  // namespace

HvdliteCore make_core_table(Engine& engine) { return {kCoreTableVersion, &engine, &submit, &find}; }

}  // namespace hvdlite
