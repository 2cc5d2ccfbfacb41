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

// The PTX text of pack.cu, NUL-terminated, which tools/make_ptx.py writes and the build embeds. The
// driver compiles it for its device.
const char* pack_ptx();

// The kernels of one PTX text, loaded on a device and unloaded by the destructor.
class KernelModule {
 public:
  // Loads the text; the driver compiles it for the device (and keeps the result on disk). `what`
  // for messages: "the kernels that...".
  static Result<std::unique_ptr<KernelModule>> load(std::shared_ptr<CudaDevice> device,
                                                    const char* ptx, const std::string& what);
  ~KernelModule();
  KernelModule(const KernelModule&) = delete;
  KernelModule& operator=(const KernelModule&) = delete;

  CudaDevice& device() const { return *device_; }
  // Launches a kernel on the device's communication stream. `argument` is the kernel's one
  // parameter.
  Status launch(const std::string& name, unsigned blocks, void* argument);

 private:
  explicit KernelModule(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}
  Result<CudaFunction> kernel(const std::string& name);

  const std::shared_ptr<CudaDevice> device_;
  CudaModule module_ = nullptr;
  std::map<std::string, CudaFunction> kernels_;  // The key is a name; its first use adds it.
};

// Moves the tensors of a batch to and from a fusion buffer on the device, and scales and casts them
// on the way. One kernel launch moves all of them, up to the length of a table (kernel_args.h).
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
