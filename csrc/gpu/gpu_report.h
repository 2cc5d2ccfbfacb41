// A report on the GPUs that this process can use, or the reason why it can use none: rows for
// `hvdlite-run --doctor`. Any thread.
#pragma once

#include <span>
#include <string>

#include "base/config.h"

namespace hvdlite {

// Whether a library can be used here.
struct Viability {
  bool ok = true;
  // Why the library cannot be used; where it can, the file, version and features that were found.
  std::string reason;
};

struct GpuReport {
  Viability driver;
  Viability nccl;
};

// Loads both libraries; `nccl_folders` are those of nvidia-nccl wheels.
GpuReport examine_gpus(const Config& config, std::span<const std::string> nccl_folders);

}  // namespace hvdlite
