#include "gpu/nccl_api.h"

#include <iterator>
#include <utility>

namespace hvdlite {
namespace {

constexpr const char* kNcclLibrary = "libnccl.so.2";

Status no_nccl(const std::string& why) { return Status(StatusCode::kInvalidArgument, why); }

struct Found {
  Dylib library;
  std::string origin;
};

// The first place that has the library decides: silently taking another copy than the one that the
// user named, or than the framework's, would hide a clash of versions.
Result<Found> search(const std::string& library, std::span<const std::string> folders) {
  if (Dylib loaded = Dylib::find_loaded(kNcclLibrary); loaded.valid()) {
    return Found{std::move(loaded), "loaded already by the framework"};
  }
  if (!library.empty()) {
    Result<Dylib> named = Dylib::open(library);
    if (named.ok()) return Found{std::move(named.value()), "named by HVDLITE_NCCL_LIBRARY"};
    return no_nccl("HVDLITE_NCCL_LIBRARY=" + library +
                   " cannot be loaded: " + named.status().message());
  }
  for (const std::string& folder : folders) {
    Result<Dylib> wheel = Dylib::open(folder + "/" + kNcclLibrary);
    if (wheel.ok()) return Found{std::move(wheel.value()), "of an nvidia-nccl wheel"};
  }
  Result<Dylib> system = Dylib::open(kNcclLibrary);
  if (system.ok()) return Found{std::move(system.value()), "of the system"};
  return no_nccl("there is no NCCL here (" + system.status().message() +
                 "); pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, as your framework has it, "
                 "or set HVDLITE_NCCL_LIBRARY");
}

// The first required symbol that is missing, or nullptr.
const char* bind(NcclApi& api) {
  const auto find = [&](auto& field, const char* symbol) {
    field = reinterpret_cast<std::decay_t<decltype(field)>>(api.library.symbol(symbol));
    return field != nullptr;
  };
  const char* missing = nullptr;
#define HVDLITE_NCCL_BIND(field, symbol, arguments)                                                \
  if (!find(api.field, symbol) && missing == nullptr) missing = symbol;
  HVDLITE_NCCL_SYMBOLS(HVDLITE_NCCL_BIND)
#undef HVDLITE_NCCL_BIND
  if (!find(api.error_string, "ncclGetErrorString")) missing = "ncclGetErrorString";
  if (!find(api.last_error, "ncclGetLastError")) missing = "ncclGetLastError";
  return missing;
}

}  // namespace

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

int nccl_dtype(DataType dtype) {
  constexpr int kNumbers[] = {1, 0, -1, 2, 4, 6, 9, 7, 8, -1, -1, 3, 5};  // none after uint64
  const auto index = static_cast<std::size_t>(dtype);
  return index < std::size(kNumbers) ? kNumbers[index] : -1;
}

Result<std::shared_ptr<const NcclApi>> NcclApi::load(const std::string& library,
                                                     std::span<const std::string> folders) {
  HVDLITE_ASSIGN_OR_RETURN(Found found, search(library, folders));
  return take(std::move(found.library), std::move(found.origin));
}

Result<std::shared_ptr<const NcclApi>> NcclApi::take(Dylib library, std::string origin) {
  auto api = std::make_shared<NcclApi>();
  api->library = std::move(library);
  api->origin = std::move(origin);
  api->path = api->library.path();
  const char* missing = bind(*api);
  if (api->get_version == nullptr || api->get_version(&api->version) != NcclResult::kSuccess) {
    return no_nccl(api->path + " is not NCCL: it does not give its version");
  }
  if (api->version < kOldestNccl || missing != nullptr) {
    return no_nccl(api->path + " (" + api->origin + ") is NCCL " + nccl_version_text(api->version) +
                   ", but 2.19 or newer is needed" +
                   (missing == nullptr ? "" : std::string(": it lacks ") + missing));
  }
  return std::shared_ptr<const NcclApi>(std::move(api));
}

}  // namespace hvdlite
