// Copies of inputs that results overwrite, so that an all-reduce or an allgather can be redone
// after a rank has died in it (elastic jobs only). Other collectives are not redone, or overwrite
// nothing that they read.
//
// The copies hang on their entries; the memory comes from pools, because fresh pages cost more than
// the copy. A data plane that can makes the copy itself, part by part, when it reads the input
// anyway; of what it has not come to, the input is whole. Only the runner calls it; the executor
// owns it.
#pragma once

#include <vector>

#include "engine/entry.h"
#include "engine/fusion_plan.h"
#include "gpu/gpu_plane.h"
#include "host/backend.h"

namespace hvdlite {

class KeptInputs {
 public:
  explicit KeptInputs(GpuPlane& gpus) : gpus_(gpus) {}  // borrowed

  // Copies what the batch is about to overwrite, or leaves the copying of host memory to `host`:
  // see copy_of(). `plane` is that of its GPU tensors, or null. The peers do not turn back, so a
  // lack of memory is kInternal.
  Status keep(const Batch& batch, const std::vector<Agreed>& round, const Backend& host,
              DeviceBackend* plane);
  // Where the host's data plane shall copy the input of the tensor, or null.
  static InputCopy* copy_of(Entry& entry, std::size_t tensor);
  // The results are handed out: takes the memory back.
  void release(Entry& entry);

 private:
  Status keep_on_host(Entry& entry, std::size_t tensor, bool by_plane);
  Status keep_on_device(Entry& entry, std::size_t tensor, CudaDevice& device);
  KeptInput take(std::size_t bytes);  // not valid where there is no memory

  GpuPlane& gpus_;
  std::vector<KeptInput> pool_;  // in host memory
};

// Writes the kept inputs of an entry back to where they were. Returns when they are there.
Status restore_inputs(Entry& entry);

}  // namespace hvdlite
