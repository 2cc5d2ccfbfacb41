#include "engine/c_api.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "base/fd.h"
#include "engine/engine.h"
#include "engine/entry.h"

namespace hvdlite {
namespace {

std::span<const HvdliteTensor> tensors_of(const HvdliteCall& call) {
  return {call.tensors, static_cast<std::size_t>(call.count)};
}

// The GPU that the call's tensors are on, all on the same one; kHostMemory where none is on any.
Result<int> gpu_of(const HvdliteCall& call, Engine& engine) {
  bool on_gpu = false;
  const void* somewhere = nullptr;
  for (const HvdliteTensor& tensor : tensors_of(call)) {
    if (tensor.device == static_cast<std::int32_t>(DeviceType::kHost)) continue;
    on_gpu = true;
    const bool empty = std::count(tensor.dims, tensor.dims + tensor.ndim, 0) > 0;
    if (!empty) somewhere = tensor.input;
  }
  return on_gpu ? engine.gpu_of(somewhere) : kHostMemory;
}

Result<EntryPtr> make_entry(const HvdliteCall& call, Engine& engine) {
  HVDLITE_RETURN_IF_ERROR(check_not_forked());
  // A call has no room for the two ranks of a send.
  if (call.kind < 0 || call.kind >= static_cast<int>(Kind::kSend)) {
    return Status(StatusCode::kInvalidArgument,
                  "kind " + std::to_string(call.kind) + " is unknown");
  }
  EntryBuilder builder(static_cast<Kind>(call.kind), call.name, call.process_set);
  builder.root(call.root).reduce(call.op, call.prescale, call.postscale);
  if (!std::isnan(call.weight)) builder.weigh(call.weight);
  builder.splits({call.splits, call.splits + call.split_count});
  const Result<int> gpu = gpu_of(call, engine);
  if (!gpu.ok()) return builder.refused(gpu.status());
  for (const HvdliteTensor& tensor : tensors_of(call)) {
    HVDLITE_ASSIGN_OR_RETURN(TensorShape shape,
                             make_shape(tensor.name, tensor.dtype, tensor.wire,
                                        {tensor.dims, tensor.dims + tensor.ndim}));
    const bool on_host = tensor.device == static_cast<std::int32_t>(DeviceType::kHost);
    builder.tensor(std::move(shape), tensor.input, tensor.output,
                   on_host ? kHostMemory : gpu.value(), static_cast<CudaStream>(call.stream));
  }
  return builder.build();
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

void submit(void* engine, const HvdliteCall* call) {
  auto& self = *static_cast<Engine*>(engine);
  const Result<EntryPtr> entry = make_entry(*call, self);
  Status status = entry.status();
  if (status.ok()) {
    // The continuation belongs to the completion, which the entry keeps until it has run.
    Completion* completion = entry.value()->completion.get();
    completion->then(
        [call = *call, completion] { report(call, completion->status(), completion); });
    status = self.enqueue(entry.value(), /*blocking=*/false);
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
