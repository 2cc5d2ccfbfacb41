#include "gpu/cuda_api.h"

namespace hvdlite {
namespace {

constexpr const char* kCudaLibrary = "libcuda.so.1";

Status no_driver(const std::string& why) { return Status(StatusCode::kInvalidArgument, why); }

Status bind(CudaApi& api) {
  const auto find = [&](auto& field, const char* symbol) {
    field = reinterpret_cast<std::decay_t<decltype(field)>>(api.library.symbol(symbol));
    return field != nullptr;
  };
  const char* missing = nullptr;
#define HVDLITE_CUDA_BIND(field, symbol, arguments)                                                \
  if (!find(api.field, symbol)) missing = symbol;
  HVDLITE_CUDA_SYMBOLS(HVDLITE_CUDA_BIND)
#undef HVDLITE_CUDA_BIND
  if (missing == nullptr) return Status();
  return no_driver(api.path + " lacks " + missing +
                   ": the NVIDIA driver is older than 450.80 (CUDA 11); update the driver");
}

Status start(CudaApi& api) {
  if (const int error = api.init(0); error != kCudaSuccess) {
    return no_driver("the NVIDIA driver does not start: " + api.describe(error));
  }
  if (api.driver_version(&api.version) != kCudaSuccess || api.version < kOldestCudaDriver) {
    return no_driver("the NVIDIA driver speaks CUDA " + cuda_version_text(api.version) + ", but " +
                     cuda_version_text(kOldestCudaDriver) +
                     " or newer is needed; update the driver");
  }
  if (api.device_count(&api.devices) != kCudaSuccess || api.devices < 1) {
    return no_driver("the NVIDIA driver works, but shows no device; check CUDA_VISIBLE_DEVICES");
  }
  return Status();
}

}  // namespace

std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string CudaApi::describe(int error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (error_name(error, &name) != kCudaSuccess || name == nullptr) {
    return "CUDA error " + std::to_string(error);
  }
  (void)error_string(error, &text);
  return text == nullptr ? std::string(name) : std::string(name) + " (" + text + ")";
}

Status CudaApi::check(int error, const std::string& what) const {
  if (error == kCudaSuccess) return Status();
  const auto code = error == kCudaOutOfMemory ? StatusCode::kOutOfMemory : StatusCode::kInternal;
  return Status(code, what + ": " + describe(error));
}

Result<std::shared_ptr<const CudaApi>> CudaApi::load(const std::string& library) {
  Result<Dylib> opened = Dylib::open(library.empty() ? kCudaLibrary : library);
  if (!opened.ok()) {
    return no_driver("there is no NVIDIA driver here (" + opened.status().message() + ")");
  }
  auto api = std::make_shared<CudaApi>();
  api->library = std::move(opened.value());
  api->path = api->library.path();
  HVDLITE_RETURN_IF_ERROR(bind(*api));
  HVDLITE_RETURN_IF_ERROR(start(*api));
  return std::shared_ptr<const CudaApi>(std::move(api));
}

}  // namespace hvdlite
