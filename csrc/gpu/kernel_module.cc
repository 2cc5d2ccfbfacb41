#include "gpu/kernel_module.h"

#include "gpu/kernel_args.h"

namespace hvdlite {

Result<std::unique_ptr<KernelModule>> KernelModule::load(std::shared_ptr<CudaDevice> device,
                                                         const char* ptx, const std::string& what) {
  std::unique_ptr<KernelModule> made(new KernelModule(std::move(device)));
  const CudaDevice& on = *made->device_;
  const CudaDevice::Current current(on);
  HVDLITE_RETURN_IF_ERROR(on.check(on.api().module_load(&made->module_, ptx), "loading " + what));
  return made;
}

KernelModule::~KernelModule() {
  if (module_ == nullptr) return;
  const CudaDevice::Current current(*device_);
  (void)device_->api().module_unload(module_);
}

Result<CudaFunction> KernelModule::kernel(const std::string& name) {
  const auto [at, is_new] = kernels_.try_emplace(name, nullptr);
  if (is_new) {
    Status status = device_->check(
        device_->api().module_function(&at->second, module_, name.c_str()), "finding " + name);
    if (!status.ok()) {
      kernels_.erase(at);
      return status;
    }
  }
  return at->second;
}

Status KernelModule::launch(const std::string& name, unsigned blocks, void* argument) {
  const CudaDevice::Current current(*device_);
  const Result<CudaFunction> function = kernel(name);
  HVDLITE_RETURN_IF_ERROR(function.status());
  void* parameters[] = {argument};
  return device_->check(device_->api().launch(function.value(), blocks, 1, 1, kThreadsPerBlock, 1,
                                              1, 0, device_->stream(), parameters, nullptr),
                        "launching a kernel");
}

}  // namespace hvdlite
