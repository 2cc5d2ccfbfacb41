// Moves the tensors of a batch to and from a fusion buffer on the device, scaled and cast on the
// way: one kernel launch for all of them (up to a table's length), see kernel_args.h. Runner only.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>

#include "backend/cuda_device.h"
#include "backend/kernel_args.h"
#include "base/dtype.h"

namespace hvdlite {

class SegmentCopies {
 public:
  // Loads the kernels, which the driver compiles for the device (it keeps the result on disk).
  static Result<std::unique_ptr<SegmentCopies>> load(std::shared_ptr<CudaDevice> device);
  ~SegmentCopies();

  // Gives the segments to the device's communication stream. Types are the same, two floating-point
  // types, or int16 and int32; a scale other than 1 goes with floating-point types, and so does
  // `nonfinite`, a word that is set where something written is infinite or NaN.
  Status enqueue(DataType source, DataType target, std::span<const CopySegment> segments,
                 const std::uint32_t* nonfinite = nullptr);
  // Kernels launched so far.
  std::uint64_t launches() const { return launches_; }

 private:
  explicit SegmentCopies(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}
  Result<CudaFunction> kernel(const std::string& name);
  Status launch(CudaFunction function, CopyArgs& args);

  const std::shared_ptr<CudaDevice> device_;
  CudaModule module_ = nullptr;
  std::map<std::string, CudaFunction> kernels_;  // by name, as far as used
  std::uint64_t launches_ = 0;
};

}  // namespace hvdlite
