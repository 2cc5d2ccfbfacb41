// Modules, kernels and the texts of errors. A module offers the kernels that its PTX declares and
// for which there is a host body.
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernel_bodies.h"
#include "cuda/stream.h"

namespace fakegpu {
namespace {

struct Kernel {
  std::size_t param_bytes = 0;
  FakeKernelBody body = nullptr;
};

struct Kernels {
  hvdlite::Mutex mutex;
  std::map<std::string, Kernel> by_name HVDLITE_GUARDED_BY(mutex) = core_kernels<Kernel>();

  Kernel find(const std::string& name) {
    hvdlite::MutexLock lock(mutex);
    const auto found = by_name.find(name);
    return found == by_name.end() ? Kernel{} : found->second;
  }
};

Kernels& kernels() {
  static auto* all = new Kernels;  // outlives the streams' threads
  return *all;
}

struct Function {
  std::string name;
  Kernel kernel;
};

struct Module {
  int device = 0;
  std::set<std::string> entries;
  hvdlite::Mutex mutex;
  std::map<std::string, std::unique_ptr<Function>> functions HVDLITE_GUARDED_BY(mutex);
};

Handles<Module>& modules() {
  static auto* all = new Handles<Module>;  // outlives the streams' threads
  return *all;
}

std::set<std::string> entries_of(const std::string& ptx) {
  constexpr std::string_view kEntry = ".entry ";
  std::set<std::string> names;
  for (std::size_t at = ptx.find(kEntry); at != std::string::npos; at = ptx.find(kEntry, at)) {
    at += kEntry.size();
    names.insert(ptx.substr(at, ptx.find_first_of("( \n", at) - at));
  }
  return names;
}

// The highest PTX version that a driver of this CUDA version compiles, times ten.
int newest_ptx(std::int64_t driver) {
  const auto major = static_cast<int>(driver / 1000);
  const auto minor = static_cast<int>(driver % 1000 / 10);
  constexpr std::array<int, 10> kOfCuda12 = {80, 81, 82, 83, 84, 85, 85, 86, 87, 88};
  if (major >= 13) return 90 + minor;
  if (major == 12) return kOfCuda12[static_cast<std::size_t>(minor < 9 ? minor : 9)];
  return major == 11 ? 70 + minor : 65;
}

CUresult check_image(const std::string& ptx) {
  int major = 0;
  int minor = 0;
  const std::size_t at = ptx.find(".version");
  if (at == std::string::npos) return CUDA_ERROR_INVALID_IMAGE;
  if (std::sscanf(ptx.c_str() + at, ".version %d.%d", &major, &minor) != 2) {
    return CUDA_ERROR_INVALID_PTX;
  }
  const std::int64_t driver = fake_option("FAKE_CUDA_DRIVER_VERSION", -1, 12080);
  return major * 10 + minor > newest_ptx(driver) ? CUDA_ERROR_UNSUPPORTED_PTX_VERSION
                                                 : CUDA_SUCCESS;
}

}  // namespace
}  // namespace fakegpu

using namespace fakegpu;

FAKE_API void fake_register_kernel(const char* name, std::size_t param_bytes, FakeKernelBody body) {
  hvdlite::MutexLock lock(kernels().mutex);
  kernels().by_name[name] = {param_bytes, body};
}

FAKE_API CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  return in_context("cuModuleLoadData", [&](Device& device) -> CUresult {
    const std::string ptx(static_cast<const char*>(image));
    if (const CUresult status = check_image(ptx)) return status;
    auto module = std::make_shared<Module>();
    module->device = device.ordinal;
    module->entries = entries_of(ptx);
    *out = modules().add(module);
    FAKE_COUNT(device, live_modules, 1);
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuModuleUnload(CUmodule handle) {
  return in_context("cuModuleUnload", [&](Device&) -> CUresult {
    const std::shared_ptr<Module> module = modules().remove(handle);
    if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    FAKE_COUNT(*device_at(module->device), live_modules, -1);
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  return in_context("cuModuleGetFunction", [&](Device&) -> CUresult {
    const std::shared_ptr<Module> module = modules().find(handle);
    if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const Kernel kernel = kernels().find(name);
    if (module->entries.count(name) == 0 || kernel.body == nullptr) return CUDA_ERROR_NOT_FOUND;
    hvdlite::MutexLock lock(module->mutex);
    auto& function = module->functions[name];
    if (function == nullptr) function = std::make_unique<Function>(Function{name, kernel});
    *out = function.get();
    return CUDA_SUCCESS;
  });
}

namespace {

// The function of a live module on that device; without a body when there is none.
Function function_of(CUfunction handle, int device) {
  Function found;
  modules().for_each([&](const std::shared_ptr<Module>& module) {
    if (module->device != device) return;
    hvdlite::MutexLock lock(module->mutex);
    for (const auto& [name, function] : module->functions) {
      if (function.get() == handle) found = *function;
    }
  });
  return found;
}

void run_kernel(const Function& function, const std::vector<char>& params,
                const FakeLaunch& launch) {
  Device& device = *device_at(launch.device);
  const int error = function.kernel.body(params.data(), &launch);
  if (error == CUDA_SUCCESS) return;
  std::fprintf(stderr, "fake_gpu: kernel %s failed with CUDA error %d\n", function.name.c_str(),
               error);
  device.sticky = error;
}

}  // namespace

FAKE_API CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y,
                                 unsigned grid_z, unsigned block_x, unsigned block_y,
                                 unsigned block_z, unsigned, CUstream stream_handle, void** params,
                                 void**) {
  return in_context("cuLaunchKernel", [&](Device& device) -> CUresult {
    const std::shared_ptr<Stream> stream = stream_of(stream_handle, device.ordinal);
    const Function function = function_of(handle, device.ordinal);
    if (stream == nullptr || stream->device() != device.ordinal ||
        function.kernel.body == nullptr) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    const FakeLaunch launch{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, device.ordinal};
    const unsigned threads = block_x * block_y * block_z;
    if (threads == 0 || threads > 1024 || grid_x == 0 || grid_y == 0 || grid_z == 0 ||
        params == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const auto* first = static_cast<const char*>(params[0]);
    std::vector<char> copied(first, first + function.kernel.param_bytes);
    FAKE_COUNT(device, kernel_launches, 1);
    if (is_default(stream_handle)) FAKE_COUNT(device, default_stream_work, 1);
    stream->put([function, copied, launch] { run_kernel(function, copied, launch); });
    return CUDA_SUCCESS;
  });
}

namespace {

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* text_of(CUresult code) {
  for (const ErrorText& error : kErrors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

}  // namespace

FAKE_API CUresult cuGetErrorString(CUresult code, const char** out) {
  const ErrorText* error = text_of(code);
  *out = error != nullptr ? error->text : nullptr;
  return error != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

FAKE_API CUresult cuGetErrorName(CUresult code, const char** out) {
  const ErrorText* error = text_of(code);
  *out = error != nullptr ? error->name : nullptr;
  return error != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
