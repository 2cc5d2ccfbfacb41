#include "engine/completion.h"

#include <cstring>

namespace hvdlite {

void Completion::clear_results() {
  first_dimensions.clear();
  outputs.clear();
  misfit = Status();
  set_id = last_joined = -1;
  members = 0;
  on_device = nullptr;
}

Status Completion::copy_output(std::size_t i, void* target, CudaStream stream) {
  Output& from = outputs[i];
  if (!from.device.valid()) {
    if (from.bytes > 0) std::memcpy(target, from.data.get(), from.bytes);
    from.data.reset();
    return Status();
  }
  CudaDevice& device = on_device->device();
  if (from.bytes > 0) {
    const CudaDevice::Current current(device);
    HVDLITE_RETURN_IF_ERROR(
        device.check(device.api().copy(address(target), from.device.address(), from.bytes, stream),
                     "copying a result"));
  }
  Result<CudaEventPtr> copied = device.record(stream);
  HVDLITE_RETURN_IF_ERROR(copied.status());
  from.pool->give_back(std::move(from.device), std::move(copied.value()));
  return Status();
}

}  // namespace hvdlite
