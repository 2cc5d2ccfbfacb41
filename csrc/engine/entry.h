// The record that travels through the engine: one collective as this rank submitted it.
//
// The submitter and the engine share it. The submitter fills it in (entry_builder.h) and then only
// reads; from Engine::enqueue() on it is the runner's, except for its completion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/completion.h"
#include "gpu/cuda_device.h"
#include "kernels/pieces.h"
#include "wire/message.h"

namespace hvdlite {

// Where the GPU tensors of an entry are. They are ready at the point that `stream` (of that GPU)
// has come to when the entry is submitted.
struct GpuSource {
  int ordinal = 0;
  CudaStream stream = nullptr;
  CudaEventPtr ready;  // The engine marks that point by it.
};

// The input of a tensor that its own output overwrites, as it was before: an elastic job submits
// the entry anew if a rank dies (engine/kept_inputs.h).
struct KeptInput {
  std::unique_ptr<std::byte[]> data;
  std::size_t capacity = 0;  // `data` has room for so many bytes.
  InputCopy copy;            // to `data`; what it lacks has not been overwritten
  // Instead of `data`, of a GPU tensor; the memory goes back to `pool`.
  DeviceMemory device;
  std::shared_ptr<DeviceMemoryPool> pool;
  CudaEventPtr copied;  // the device has made the copy
  bool valid() const { return data != nullptr || device.valid(); }
};

// What an optional feature keeps with an entry that is its (engine/rank_extension.h).
struct Attachment {
  virtual ~Attachment() = default;
};

struct Entry {
  Request request;
  std::string key;                  // request.key(), made once
  std::vector<const void*> inputs;  // Each tensor has one; the submitter keeps the memory alive.
  std::vector<void*> outputs;       // Each tensor has one, unless the completion brings the result.
  // An allgather, a reducescatter or an alltoall says for each tensor how many bytes of a result
  // fit at the output. 0, or too few numbers: the completion brings the result.
  std::vector<std::uint64_t> capacities;
  std::optional<GpuSource> gpu;   // where some tensor is on one
  double weight = 1.0;            // this rank's, for weighted averages
  std::int64_t submitted_at = 0;  // trace_now() at the call
  // The same, or earlier: when the program had the first gradient that it has submitted with this.
  std::int64_t began_at = 0;
  bool after_wait = false;                 // as Arrival::after_wait
  std::uint32_t removes = 0;               // a removal's process set; the engine adds its ranks
  std::uint64_t order = UINT64_MAX;        // among the entries of its engine; the queue counts
  std::vector<KeptInput> kept;             // It is empty, or each tensor has one.
  std::unique_ptr<Attachment> attachment;  // It is null unless a feature has one.
  std::shared_ptr<Completion> completion = std::make_shared<Completion>();

  std::uint64_t capacity(std::size_t tensor) const {
    return tensor < capacities.size() ? capacities[tensor] : 0;
  }
};
using EntryPtr = std::shared_ptr<Entry>;

// An entry that every member of its process set has submitted.
struct Agreed {
  EntryPtr entry;
  std::vector<std::int64_t> first_dimensions;  // Response says what these five are.
  std::vector<int> absent;
  std::uint32_t generation = 0;
  int set_id = -1;
  int last_joined = -1;
};

// What one respond frame holds for this rank, cut where the settings change.
struct Round {
  std::optional<Tunables> tunables;  // they hold from this round on
  bool settled = false;              // with `tunables`: for good
  std::vector<Agreed> entries;
};

}  // namespace hvdlite
