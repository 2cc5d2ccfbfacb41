// What GPUs could be used here, and why not: rows for `hvdlite-run --doctor`. Any thread.
#pragma once

#include <span>
#include <string>

#include "backend/backend.h"
#include "base/config.h"

namespace hvdlite {

// `reason` says what was found where it is ok: file, version, features.
struct GpuReport {
  Viability driver;
  Viability nccl;
};

// Loads both libraries; `nccl_folders` as for GpuPlane.
GpuReport examine_gpus(const Config& config, std::span<const std::string> nccl_folders);

}  // namespace hvdlite
