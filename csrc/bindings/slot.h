// A slot of device memory as Python holds it: frameworks make tensors of it without a copy, by
// __cuda_array_interface__, and hold it as long as those live. Python owns it, and the GIL guards
// it, which is released while the end of a slot waits for the device.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "bindings/unlocked.h"
#include "gpu/device_slots.h"
#include "os/fd.h"

namespace hvdlite {

class SlotObject {
 public:
  explicit SlotObject(DeviceSlots::Holder slot) : slot_(std::move(slot)) {}
  ~SlotObject() {
    // The memory is the parent's, and so is the thread that frees it.
    if (forked()) {
      new DeviceSlots::Holder(std::move(slot_));  // NOLINT: never deleted
      return;
    }
    const Unlocked unlocked;
    slot_.reset();
  }
  SlotObject(const SlotObject&) = delete;
  SlotObject& operator=(const SlotObject&) = delete;

  // Version 3, as bytes; the framework need not wait for any stream.
  pybind11::dict cuda_array_interface() const;

 private:
  DeviceSlots::Holder slot_;
};

void register_slot(pybind11::module_& module);

}  // namespace hvdlite
