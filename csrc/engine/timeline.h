// What the engine tells the trace: the way of each entry, in the engine's words.
//
// An entry is a task: "queue" from the call to the runner, "negotiate" until all ranks have asked
// for it, "wait for batch" until its first one begins, then the name of the collective until the
// entry ends. The row "engine" holds the batches, and the backend's parts within; the row of a GPU
// what the device itself did for them. (On rank 0 the coordinator adds what it waits for.) Each
// call costs one load while the trace is off (trace/trace.h). Only the runner calls it.
#pragma once

#include <string>
#include <utility>

#include "engine/entry.h"
#include "gpu/device_trace.h"
#include "host/backend.h"
#include "trace/trace.h"

namespace hvdlite {

class Timeline {
 public:
  explicit Timeline(Trace& trace) : trace_(trace), devices_(trace) {}  // borrowed

  void taken(const std::vector<EntryPtr>& entries) const {
    if (trace_.on()) write_taken(entries);
  }
  void agreed(const std::vector<Agreed>& round) const {
    if (trace_.on()) write_agreed(round);
  }
  void finished(const Entry& entry, const Status& status) const {
    if (trace_.on()) trace_.close(TaskGroup::kTensors, id_of(entry), status.message());
  }
  // Spans of devices come later than the calls that caused them.
  bool waits_for_devices() const { return devices_.waits(); }
  void write_devices() { devices_.write(); }

  // One batch on the row "engine", and on that of its GPU, if it has one, for the scope.
  class BatchScope {
   public:
    BatchScope(Timeline& timeline, const Batch& batch, const std::vector<Agreed>& round,
               std::uint64_t number, CudaDevice* gpu)
        : timeline_(timeline.trace_.on() ? &timeline : nullptr), bytes_(batch.bytes) {
      if (timeline_ == nullptr) return;
      name_ = timeline.write_batch(batch, round, number);
      if (gpu != nullptr) timeline.devices_.begin(*gpu);
    }
    ~BatchScope() {
      if (timeline_ == nullptr) return;
      timeline_->devices_.end(std::move(name_), bytes_);
      timeline_->trace_.end(Backend::kTraceRow);
    }
    BatchScope(const BatchScope&) = delete;
    BatchScope& operator=(const BatchScope&) = delete;

   private:
    Timeline* const timeline_;  // It is null while the trace is off.
    const std::uint64_t bytes_;
    std::string name_;
  };

 private:
  static std::uint64_t id_of(const Entry& entry) {
    return reinterpret_cast<std::uintptr_t>(&entry);  // its own while it is in flight
  }

  void write_taken(const std::vector<EntryPtr>& entries) const;
  void write_agreed(const std::vector<Agreed>& round) const;
  // Returns the batch's name.
  std::string write_batch(const Batch& batch, const std::vector<Agreed>& round,
                          std::uint64_t number) const;

  Trace& trace_;
  DeviceTrace devices_;
};

}  // namespace hvdlite
