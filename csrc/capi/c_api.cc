#include "capi/c_api.h"

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
                               {tensor.dims, tensor.dims + tensor.ndim},
                               static_cast<DeviceType>(tensor.device),
                               static_cast<DataType>(tensor.wire)});
    entry->inputs.push_back(tensor.input);
    entry->outputs.push_back(tensor.output);
  }
  return entry;
}

// What the result of a call refers to while `done` runs.
struct Ended {
  Completion* completion;
  CudaStream stream;
};

bool copy_output(const HvdliteResult* result, std::int32_t i, void* target) {
  const auto& ended = *static_cast<const Ended*>(result->core);
  return ended.completion->copy_output(static_cast<std::size_t>(i), target, ended.stream).ok();
}

// The call's stream goes on only after what this operation does on the device, however it ended.
Status let_stream_wait(const HvdliteCall& call, const Completion& completion) {
  if (completion.on_device == nullptr) return Status();
  const CudaEvent& end = *completion.on_device;
  return end.device().wait(static_cast<CudaStream>(call.stream), end);
}

void report(const HvdliteCall& call, Status status, Completion* completion) {
  if (completion != nullptr) {
    const Status waits = let_stream_wait(call, *completion);
    if (status.ok()) status = waits;
  }
  HvdliteResult result{};
  result.code = static_cast<std::int32_t>(status.code());
  result.failed_rank = status.failed_rank();
  result.message = status.message().c_str();
  Ended ended{completion, static_cast<CudaStream>(call.stream)};
  result.core = &ended;
  std::vector<std::uint64_t> bytes;
  if (completion != nullptr && !completion->outputs.empty()) {
    for (const auto& output : completion->outputs) bytes.push_back(output.bytes);
    result.first_dimensions = completion->first_dimensions.data();
    result.parts = static_cast<std::int32_t>(completion->first_dimensions.size() / bytes.size());
    result.count = static_cast<std::int32_t>(bytes.size());
    result.output_bytes = bytes.data();
    result.copy_output = &copy_output;
  }
  call.done(call.context, &result);
}

// Finds out which GPU the tensors are on, if any is.
Status place(Entry& entry, const HvdliteCall& call, Engine& engine) {
  bool on_gpu = false;
  const void* somewhere = nullptr;
  for (std::size_t i = 0; i < entry.inputs.size(); ++i) {
    const TensorShape& tensor = entry.request.tensors[i];
    if (tensor.device == DeviceType::kHost) continue;
    on_gpu = true;
    if (tensor.count() > 0) somewhere = entry.inputs[i];
  }
  if (!on_gpu) return Status();
  const Result<int> ordinal = engine.gpu_of(somewhere);
  if (!ordinal.ok()) {
    return Status(ordinal.status().code(),
                  describe(entry.request) + ": " + ordinal.status().message());
  }
  entry.gpu = GpuSource{ordinal.value(), static_cast<CudaStream>(call.stream), nullptr};
  return Status();
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
  for (std::int32_t i = 0; i < call.count; ++i) {
    const HvdliteTensor& tensor = call.tensors[i];
    for (const std::int32_t dtype : {tensor.dtype, tensor.wire}) {
      if (is_valid_dtype(dtype)) continue;
      return Status(StatusCode::kInvalidArgument,
                    "'" + std::string(tensor.name) +
                        "' is of a dtype that cannot be sent (number " + std::to_string(dtype) +
                        ")");
    }
  }
  return Status();
}

void submit(void* engine, const HvdliteCall* call) {
  Status status = check(*call);
  if (status.ok()) {
    const EntryPtr entry = make_entry(*call);
    auto& self = *static_cast<Engine*>(engine);
    // The continuation belongs to the completion, which the entry keeps until it has run.
    Completion* completion = entry->completion.get();
    completion->then(
        [call = *call, completion] { report(call, completion->status(), completion); });
    status = place(*entry, *call, self);
    if (status.ok()) status = self.enqueue(entry, /*blocking=*/false);
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
