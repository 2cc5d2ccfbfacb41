// Access to the fake libcuda and libnccl (tests/fakes/gpu) that are built beside the tests.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace hvdlite::testing {

// The folder that holds libcuda.so.1 and libnccl.so.2.
inline const std::string& fake_gpu_folder() {
  static const std::string folder = FAKE_GPU_FOLDER;
  return folder;
}

// Set before main(): the fake counts its devices at the first call, and the devices of all ranks
// then live as long as the process.
inline const bool gpus_set = ::setenv("FAKE_CUDA_DEVICES", "8", 1) == 0;

// Looks up a function of a fake library, with the type `Function`. Ends the process when the
// library has no such function.
template <typename Function>
Function* fake_function(const char* library, const char* name) {
  void* handle = ::dlopen((fake_gpu_folder() + "/" + library).c_str(), RTLD_NOW | RTLD_LOCAL);
  void* function = handle != nullptr ? ::dlsym(handle, name) : nullptr;
  if (function == nullptr) {
    std::fprintf(stderr, "%s of %s: %s\n", name, library, ::dlerror());
    std::abort();
  }
  return reinterpret_cast<Function*>(function);
}

// Calls a function of the fake libcuda and returns its status.
template <typename... Arguments>
int cuda(const char* name, Arguments... arguments) {
  return fake_function<int(Arguments...)>("libcuda.so.1", name)(arguments...);
}

}  // namespace hvdlite::testing
