#include "engine/timeline.h"

#include <cstdio>

namespace hvdlite {
namespace {

// A literal.
const char* label_of(Kind kind) { return name_of(kind).data(); }

}  // namespace

void Timeline::write_taken(const std::vector<EntryPtr>& entries) const {
  const TraceTime now = trace_now();
  for (const EntryPtr& entry : entries) {
    const Request& request = entry->request;
    const TraceTime since = entry->submitted_at;
    const std::uint64_t id = id_of(*entry);
    trace_.open(TaskGroup::kTensors, id, trace_label(request), since, label_of(request.kind),
                request.wire_bytes());
    trace_.phase(TaskGroup::kTensors, id, "queue", since);
    trace_.phase(TaskGroup::kTensors, id, "negotiate", now);
  }
}

void Timeline::write_agreed(const std::vector<Agreed>& round) const {
  const TraceTime now = trace_now();
  for (const Agreed& agreed : round) {
    trace_.phase(TaskGroup::kTensors, id_of(*agreed.entry), "wait for batch", now);
  }
  trace_.round(Backend::kTraceRow, static_cast<std::int64_t>(round.size()));
}

std::string Timeline::write_batch(const Batch& batch, const std::vector<Agreed>& round,
                                  std::uint64_t number) const {
  const char* kind = label_of(batch.kind);
  const auto batch_number = static_cast<std::int64_t>(number);
  const Request& first = round[batch.tensors[0].agreed].entry->request;
  char name[kMaxNameBytes + 32];
  if (batch.tensors.size() == 1) {
    std::snprintf(name, sizeof name, "%s %s", kind, first.name.c_str());
  } else {
    std::snprintf(name, sizeof name, "%s of %zu tensors", kind, batch.tensors.size());
  }
  trace_.begin(Backend::kTraceRow, name, batch_number, batch.bytes);
  const TraceTime now = trace_now();
  for (const TensorRef& ref : batch.tensors) {
    // An entry of many tensors enters its collective with the first of them.
    if (ref.tensor > 0) continue;
    trace_.phase(TaskGroup::kTensors, id_of(*round[ref.agreed].entry), kind, now, batch_number);
  }
  return name;
}

}  // namespace hvdlite
