// What GPUs could be used here, and why not: rows for `hvdlite-run --doctor`. Any thread.
#pragma once

#include <span>
#include <string>

#include "base/config.h"

namespace hvdlite {

// Whether a library can be used here.
struct Viability {
  bool ok = true;
  std::string reason;  // why it cannot be; where it can, what was found: file, version, features
};

struct GpuReport {
  Viability driver;
  Viability nccl;
};

// Loads both libraries; `nccl_folders` as for GpuPlane.
GpuReport examine_gpus(const Config& config, std::span<const std::string> nccl_folders);

}  // namespace hvdlite
