// Modules, kernels and the texts of errors. A module offers the kernels that its PTX declares and
// for which there is a host body.
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernel_bodies.h"
#include "cuda/stream.h"

namespace fakegpu {
namespace {

struct Module {
  int device = 0;
  std::set<std::string> entries;
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

// A function's handle is its place in the table of host bodies.
const Kernel* kernel_of(CUfunction handle) {
  for (const auto& [name, kernel] : core_kernels()) {
    if (&kernel == handle) return &kernel;
  }
  return nullptr;
}

void run_kernel(const Kernel& kernel, const hvdlite::CopyArgs& args, const FakeLaunch& launch) {
  const int error = kernel.body(args, launch);
  if (error == CUDA_SUCCESS) return;
  std::fprintf(stderr, "fake_gpu: a kernel failed with CUDA error %d\n", error);
  device_at(launch.device)->sticky = error;
}

}  // namespace
}  // namespace fakegpu

using namespace fakegpu;

FAKE_API CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  return in_context([&](Device& device) -> CUresult {
    auto module = std::make_shared<Module>();
    module->device = device.ordinal;
    module->entries = entries_of(static_cast<const char*>(image));
    *out = modules().add(module);
    FAKE_COUNT(device, live_modules, 1);
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuModuleUnload(CUmodule handle) {
  return in_context([&](Device&) -> CUresult {
    const std::shared_ptr<Module> module = modules().remove(handle);
    if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    FAKE_COUNT(*device_at(module->device), live_modules, -1);
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  return in_context([&](Device&) -> CUresult {
    const std::shared_ptr<Module> module = modules().find(handle);
    if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const auto found = core_kernels().find(name);
    if (module->entries.count(name) == 0 || found == core_kernels().end()) {
      return CUDA_ERROR_NOT_FOUND;
    }
    *out = const_cast<Kernel*>(&found->second);
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y,
                                 unsigned grid_z, unsigned block_x, unsigned block_y,
                                 unsigned block_z, unsigned, CUstream stream_handle, void** params,
                                 void**) {
  return in_context([&](Device& device) -> CUresult {
    const std::shared_ptr<Stream> stream = stream_of(stream_handle, device.ordinal);
    const Kernel* kernel = kernel_of(handle);
    if (stream == nullptr || stream->device() != device.ordinal || kernel == nullptr) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    if (block_x == 0 || block_x > 1024 || grid_x == 0 || grid_y * grid_z * block_y * block_z != 1) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const FakeLaunch launch{grid_x, block_x, device.ordinal};
    const auto args = *static_cast<const hvdlite::CopyArgs*>(params[0]);
    FAKE_COUNT(device, kernel_launches, 1);
    if (is_default(stream_handle)) FAKE_COUNT(device, default_stream_work, 1);
    stream->put([kernel, args, launch] { run_kernel(*kernel, args, launch); });
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuGetErrorString(CUresult code, const char** out) {
#define FAKE_CUDA_TEXT(name, number, text)                                                         \
  if (code == (number)) return *out = text, CUDA_SUCCESS;
  FAKE_CUDA_ERRORS(FAKE_CUDA_TEXT)
#undef FAKE_CUDA_TEXT
  return CUDA_ERROR_INVALID_VALUE;
}

FAKE_API CUresult cuGetErrorName(CUresult code, const char** out) {
#define FAKE_CUDA_NAME(name, number, text)                                                         \
  if (code == (number)) return *out = #name, CUDA_SUCCESS;
  FAKE_CUDA_ERRORS(FAKE_CUDA_NAME)
#undef FAKE_CUDA_NAME
  return CUDA_ERROR_INVALID_VALUE;
}
