// A data plane for memory of a GPU. The calls of Backend take addresses on the device. They return
// when the work has been given to the device's communication stream, not when it is done; the
// stream runs work in the order of the calls.
//
// A caller calls after_events(), then one or more collectives, then record(). poll() returns an
// error of the device that comes later. Implementations: nccl_backend; self_device_backend (groups
// of one rank); staged_backend (no NCCL: through the host, where calls do wait). In an allreduce an
// input of nullptr stands for zeros. GpuPlane owns the data planes; only the runner calls them.
#pragma once

#include <span>

#include "gpu/cuda_device.h"
#include "host/backend.h"

namespace hvdlite {

class DeviceBackend : public Backend {
 public:
  virtual CudaDevice& device() const = 0;
  // Makes the collectives that are called next read and overwrite memory only after these points.
  Status after_events(std::span<const CudaEventPtr> producers) {
    for (const CudaEventPtr& event : producers) {
      HVDLITE_RETURN_IF_ERROR(device().wait(device().stream(), *event));
    }
    return Status();
  }
  // Marks the point after all work that was given to the stream so far.
  Result<CudaEventPtr> record() { return device().record(device().stream()); }
  // Drops all knowledge of memory that is about to be freed. No work is under way.
  virtual void forget_memory(CudaPointer /*address*/) {}
  // Returns an error that came after a call had returned. The runner asks while work is under way.
  virtual Status poll() { return Status(); }
  // Ends the work that is under way on the device, and lets go of the peers. The results of that
  // work must not be used, and no function is called afterwards.
  virtual void abort() {}
  // Lets go of the peers in good order, together with the peers, or aborts at the deadline. All
  // work has ended before.
  virtual void close(Deadline) {}
};

}  // namespace hvdlite
