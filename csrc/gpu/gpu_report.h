// A report on the GPUs that this process can use, or the reason why it can use none: rows for
// `hvdlite-run --doctor`. Any thread.
#pragma once

#include <span>
#include <string>

#include "backend/backend.h"
#include "base/config.h"

namespace hvdlite {

// Where a library is ok, its `reason` names the file, the version and the features that were found.
struct GpuReport {
  Viability driver;
  Viability nccl;
};

// Loads both libraries; `nccl_folders` are those of nvidia-nccl wheels.
GpuReport examine_gpus(const Config& config, std::span<const std::string> nccl_folders);

}  // namespace hvdlite
