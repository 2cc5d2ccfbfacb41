// Gradient memory as Python holds it: an area on a GPU (gpu/device_workspace.h), or a part of what
// the ranks of a host share (transport/segment.h). Frameworks make tensors of it without a
// copy, by __cuda_array_interface__ or the buffer protocol, and hold this object as long as those
// tensors live. Thread: any that holds the GIL; the destructor of the first releases the GIL while
// it waits for the device.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "base/fd.h"
#include "gpu/device_workspace.h"
#include "python/unlocked.h"
#include "transport/segment.h"

namespace hvdlite {

class GradientMemoryObject {
 public:
  explicit GradientMemoryObject(GradientMemory::Holder memory) : memory_(std::move(memory)) {}
  ~GradientMemoryObject() {
    // The memory belongs to the parent, and so does the thread that frees it.
    if (forked()) {
      new GradientMemory::Holder(std::move(memory_));  // NOLINT: never deleted
      return;
    }
    const Unlocked unlocked;
    memory_.reset();
  }
  GradientMemoryObject(const GradientMemoryObject&) = delete;
  GradientMemoryObject& operator=(const GradientMemoryObject&) = delete;

  // The memory as bytes, in version 3 of the interface. It names no stream, so the framework does
  // not wait for one.
  pybind11::dict cuda_array_interface() const;

 private:
  GradientMemory::Holder memory_;
};

class SharedGradientMemoryObject {
 public:
  explicit SharedGradientMemoryObject(GradientArea::Part part) : part_(std::move(part)) {}
  ~SharedGradientMemoryObject() {
    // The parent's pages are the same ones, and it still uses them.
    if (forked()) new GradientArea::Part(std::move(part_));  // NOLINT: never deleted
  }
  SharedGradientMemoryObject(const SharedGradientMemoryObject&) = delete;
  SharedGradientMemoryObject& operator=(const SharedGradientMemoryObject&) = delete;

  pybind11::buffer_info bytes() const;

 private:
  GradientArea::Part part_;
};

void register_gradient_memory(pybind11::module_& module);

}  // namespace hvdlite
