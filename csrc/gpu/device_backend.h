// A data plane for memory of a GPU. The calls of Backend take addresses on the device, and return
// when the work has been given to the device's communication stream, not when it is done; what is
// on that stream runs in the order of the calls.
//
// So: after_events(), then one or more collectives, then record(). An error of the device that
// comes later is seen by poll(). Implementations: nccl_backend; self_device_backend (groups of one
// rank); staged_backend (no NCCL: through the host, where calls do wait).
// In an allreduce an input of nullptr stands for zeros. Thread: the runner.
#pragma once

#include <span>

#include "backend/backend.h"
#include "cuda/cuda_device.h"
#include "cuda/finite_words.h"

namespace hvdlite {

class DeviceBackend : public Backend {
 public:
  virtual CudaDevice& device() const = 0;
  // What is called next reads and overwrites memory only after these points.
  Status after_events(std::span<const CudaEventPtr> producers) {
    for (const CudaEventPtr& event : producers) {
      HVDLITE_RETURN_IF_ERROR(device().wait(device().stream(), *event));
    }
    return Status();
  }
  // The point after everything that was called so far.
  Result<CudaEventPtr> record() { return device().record(device().stream()); }
  // This memory is about to be freed; no work is under way.
  virtual void forget_memory(CudaPointer /*address*/) {}
  // The next allreduce, of floating-point tensors, sets the word where something that this rank
  // gives is infinite or NaN, once scaled and cast; to be read when that allreduce has ended. A
  // group of one rank does not look.
  virtual Result<FiniteWord> look_for_nonfinite() { return FiniteWord(); }
  // An error that came after a call had returned; looked at while work is under way.
  virtual Status poll() { return Status(); }
  // Ends whatever is under way on the device, with results that nobody may use, and lets go of the
  // peers. Nothing is called afterwards.
  virtual void abort() {}
  // Lets go of the peers in good order, which they do as well, or aborts at the deadline. What was
  // called has ended before.
  virtual void close(Deadline) {}
};

}  // namespace hvdlite
