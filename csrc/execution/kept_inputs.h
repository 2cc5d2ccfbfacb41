// Copies of inputs that their own outputs overwrite, so that an all-reduce can be redone after a
// rank has died in it (elastic jobs only).
//
// The copies hang on their entries; the memory comes from pools, because fresh pages cost more than
// the copy. Only the runner calls it; the executor owns it.
#pragma once

#include <vector>

#include "entry/entry.h"
#include "execution/fusion_plan.h"
#include "gpu/gpu_plane.h"

namespace hvdlite {

class KeptInputs {
 public:
  explicit KeptInputs(GpuPlane& gpus) : gpus_(gpus) {}  // borrowed

  // Copies what the batch is about to overwrite. `plane` is that of its GPU tensors, or null. The
  // peers do not turn back, so a lack of memory is kInternal.
  Status keep(const Batch& batch, const std::vector<Agreed>& round, DeviceBackend* plane);
  // The results are handed out: takes the memory back.
  void release(Entry& entry);

 private:
  Status keep_tensor(Entry& entry, std::size_t tensor, DeviceBackend* plane);
  Status keep_on_device(Entry& entry, std::size_t tensor, CudaDevice& device);
  KeptInput take(std::size_t bytes);  // not valid where there is no memory

  GpuPlane& gpus_;
  std::vector<KeptInput> pool_;  // in host memory
};

// Writes the kept inputs of an entry back to where they were. Returns when they are there.
Status restore_inputs(Entry& entry);

}  // namespace hvdlite
