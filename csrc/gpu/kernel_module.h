// The kernels of one PTX text, loaded on a device and unloaded by the destructor. Runner only.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "gpu/cuda_device.h"

namespace hvdlite {

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

}  // namespace hvdlite
