// Host bodies of the kernels of csrc/gpu/kernels.
#pragma once

#include <map>
#include <string>

#include "gpu/kernel_args.h"

namespace fakegpu {

struct FakeLaunch {
  unsigned blocks;
  unsigned threads;
  int device;
};

// Runs on the stream's thread. Returns 0, or the CUDA error that the launch leaves behind.
struct Kernel {
  int (*body)(hvdlite::CopyArgs args, const FakeLaunch& launch) = nullptr;
};

// By name; lives as long as the process.
const std::map<std::string, Kernel>& core_kernels();

}  // namespace fakegpu
