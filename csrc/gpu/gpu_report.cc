#include "gpu/gpu_report.h"

#include "gpu/cuda_api.h"
#include "gpu/nccl_api.h"

namespace hvdlite {
namespace {

Viability examine_driver(const Config& config) {
  const auto cuda = CudaApi::load(config.cuda_library);
  if (!cuda.ok()) return {false, cuda.status().message()};
  const CudaApi& api = *cuda.value();
  return {true, "CUDA " + cuda_version_text(api.version) + ", " + std::to_string(api.devices) +
                    (api.devices == 1 ? " device, " : " devices, ") + api.path};
}

Viability examine_nccl(const Config& config, std::span<const std::string> folders) {
  const auto nccl = NcclApi::load(config.nccl_library, folders);
  if (!nccl.ok()) return {false, nccl.status().message()};
  const NcclApi& api = *nccl.value();
  std::string text = nccl_version_text(api.version) + ", " + api.path + " (" + api.origin + ")";
  if (api.version > kNewestNccl) text += ", newer than any version that was tested";
  return {true, text};
}

}  // namespace

GpuReport examine_gpus(const Config& config, std::span<const std::string> nccl_folders) {
  return {examine_driver(config), examine_nccl(config, nccl_folders)};
}

}  // namespace hvdlite
