// The GPU kernels of pack.cu (kernel_args.h), and the copies that they make. Runner only.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>

#include "base/dtype.h"
#include "gpu/cuda_device.h"
#include "gpu/kernel_args.h"

namespace hvdlite {

// The kernels, loaded on a device. They move the tensors of a batch to and from a fusion buffer on
// the device, and scale and cast them on the way. One launch moves all of them, up to the length of
// a table (kernel_args.h).
class SegmentCopies {
 public:
  // The driver compiles the PTX for the device (and keeps the result on disk).
  static Result<std::unique_ptr<SegmentCopies>> load(std::shared_ptr<CudaDevice> device);
  ~SegmentCopies();
  SegmentCopies(const SegmentCopies&) = delete;
  SegmentCopies& operator=(const SegmentCopies&) = delete;

  // Gives the segments to the device's communication stream. Types are the same, or a 16-bit float
  // and float32; a scale other than 1 goes with floating-point types.
  Status enqueue(DataType source, DataType target, std::span<const CopySegment> segments);
  // Launches a kernel on that stream.
  Status launch(const std::string& name, unsigned blocks, CopyArgs& args);

 private:
  explicit SegmentCopies(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}
  Result<CudaFunction> kernel(const std::string& name);

  const std::shared_ptr<CudaDevice> device_;
  CudaModule module_ = nullptr;
  std::map<std::string, CudaFunction> kernels_;  // The key is a name; its first use adds it.
};

}  // namespace hvdlite
