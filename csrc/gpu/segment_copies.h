// Moves the tensors of a batch to and from a fusion buffer on the device, and scales and casts them
// on the way. One kernel launch moves all of them, up to the length of a table (kernel_args.h).
// Runner only.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/dtype.h"
#include "gpu/kernel_args.h"
#include "gpu/kernel_module.h"

namespace hvdlite {

class SegmentCopies {
 public:
  static Result<std::unique_ptr<SegmentCopies>> load(std::shared_ptr<CudaDevice> device);

  // Gives the segments to the device's communication stream. Types are the same, or a 16-bit float
  // and float32; a scale other than 1 goes with floating-point types.
  Status enqueue(DataType source, DataType target, std::span<const CopySegment> segments);

 private:
  explicit SegmentCopies(std::unique_ptr<KernelModule> kernels) : kernels_(std::move(kernels)) {}
  Status launch(const std::string& name, CopyArgs& args);

  const std::unique_ptr<KernelModule> kernels_;
};

}  // namespace hvdlite
