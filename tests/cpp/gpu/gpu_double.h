// The doubles of libcuda and libnccl that were built beside the tests, by name.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace hvdlite::testing {

// The folder that holds libcuda.so.1 and libnccl.so.2.
inline const std::string& gpu_double_folder() {
  static const std::string folder = GPU_DOUBLE_FOLDER;
  return folder;
}

// The double counts devices at its first call, and every rank's lives as long as the process: so
// before main().
inline const bool gpus_set = ::setenv("FAKE_CUDA_DEVICES", "8", 1) == 0;

// The function `name` of the double, with the type of `Function`; the process ends without it.
template <typename Function>
Function* gpu_double(const char* library, const char* name) {
  void* handle = ::dlopen((gpu_double_folder() + "/" + library).c_str(), RTLD_NOW | RTLD_LOCAL);
  void* function = handle != nullptr ? ::dlsym(handle, name) : nullptr;
  if (function == nullptr) {
    std::fprintf(stderr, "%s of %s: %s\n", name, library, ::dlerror());
    std::abort();
  }
  return reinterpret_cast<Function*>(function);
}

// Calls a function of libcuda, as its status.
template <typename... Arguments>
int cuda(const char* name, Arguments... arguments) {
  return gpu_double<int(Arguments...)>("libcuda.so.1", name)(arguments...);
}

}  // namespace hvdlite::testing
