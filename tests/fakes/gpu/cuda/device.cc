#include "cuda/device.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cuda/stream.h"

namespace fakegpu {
namespace {

std::atomic<bool> initialised{false};
thread_local Device* current = nullptr;

std::vector<Device*>& devices() {
  static auto* all = [] {
    auto* made = new std::vector<Device*>;  // outlives the streams' threads
    for (int i = 0; i < fake_option("FAKE_CUDA_DEVICES", -1, 1); ++i) {
      made->push_back(new Device);
      made->back()->ordinal = i;
    }
    return made;
  }();
  return *all;
}

// nullptr when the handle is not a context of this process.
Device* device_of(CUcontext context) {
  for (Device* device : devices()) {
    if (device == context) return device;
  }
  return nullptr;
}

}  // namespace

Device* device_at(int ordinal) {
  return ordinal >= 0 && ordinal < static_cast<int>(devices().size())
             ? devices()[static_cast<std::size_t>(ordinal)]
             : nullptr;
}

Device* current_device() { return current; }

std::shared_ptr<Stream> Device::default_stream() {
  hvdlite::MutexLock lock(mutex);
  if (default_ == nullptr) default_ = Stream::start(ordinal);
  return default_;
}

CUresult enter() { return initialised ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED; }

}  // namespace fakegpu

using namespace fakegpu;

FAKE_API CUresult cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (devices().empty()) return CUDA_ERROR_NO_DEVICE;
  initialised = true;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDriverGetVersion(int* version) {
  *version = static_cast<int>(fake_option("FAKE_CUDA_DRIVER_VERSION", -1, 12080));
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetCount(int* count) {
  if (const CUresult status = enter()) return status;
  *count = static_cast<int>(devices().size());
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (const CUresult status = enter()) return status;
  *device = ordinal;
  return device_at(ordinal) != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

FAKE_API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice ordinal) {
  if (device_at(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *uuid = {};
  uuid->bytes[0] = 'F';
  uuid->bytes[15] = static_cast<char>(ordinal);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice ordinal) {
  if (device_at(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 4 : 0;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
  if (const CUresult status = enter()) return status;
  Device* device = device_at(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  ++device->retained;
  FAKE_COUNT(*device, live_contexts, 1);
  *context = device;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
  Device* device = device_at(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (device->retained <= 0) return CUDA_ERROR_INVALID_CONTEXT;
  --device->retained;
  FAKE_COUNT(*device, live_contexts, -1);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxGetCurrent(CUcontext* context) {
  if (const CUresult status = enter()) return status;
  *context = current;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxSetCurrent(CUcontext context) {
  if (const CUresult status = enter()) return status;
  if (context != nullptr && device_of(context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  current = device_of(context);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxGetDevice(CUdevice* ordinal) {
  return in_context([&](const Device& device) -> CUresult {
    *ordinal = device.ordinal;
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return in_context([&](const Device&) -> CUresult {
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
  });
}

FAKE_API void fake_counters(int device, FakeCounters* out) {
  std::array<std::int64_t, sizeof(FakeCounters) / sizeof(std::int64_t)> sums{};
  for (const Device* one : devices()) {
    if (device >= 0 && device != one->ordinal) continue;
    for (std::size_t c = 0; c < sums.size(); ++c) sums[c] += one->counters[c];
  }
  std::memcpy(out, sums.data(), sizeof *out);
}

FAKE_API void fake_count(int device, std::size_t offset, std::int64_t change) {
  device_at(device)->counters[offset / sizeof(std::int64_t)] += change;
}

FAKE_API int fake_current_device() { return current != nullptr ? current->ordinal : 0; }

// Options, which a test sets or else the environment, and injected failures.

namespace {

struct Option {
  std::int64_t value = 0;
  std::int64_t at = 0;  // of a failure: the one call that fails, from 1; 0: every call
  std::int64_t calls = 0;
};

struct Options {
  hvdlite::Mutex mutex;
  std::map<std::string, Option> by_name HVDLITE_GUARDED_BY(mutex);  // as tests set them

  Option* find(const std::string& name, int device) HVDLITE_REQUIRES(mutex) {
    auto found = by_name.find(name + ":" + std::to_string(device));
    if (found == by_name.end()) found = by_name.find(name);
    return found == by_name.end() ? nullptr : &found->second;
  }
};

Options& options() {
  static auto* all = new Options;  // outlives the streams' threads
  return *all;
}

}  // namespace

FAKE_API void fake_set_option(const char* name, int device, const char* value) {
  const std::string key =
      device < 0 ? std::string(name) : std::string(name) + ":" + std::to_string(device);
  hvdlite::MutexLock lock(options().mutex);
  options().by_name.erase(key);
  if (value == nullptr) return;
  char* end = nullptr;
  Option& option = options().by_name[key];
  option.value = std::strtoll(value, &end, 10);
  if (*end == '@') option.at = std::strtoll(end + 1, nullptr, 10);  // "VALUE@CALL"
}

FAKE_API std::int64_t fake_option(const char* name, int device, std::int64_t fallback) {
  hvdlite::MutexLock lock(options().mutex);
  if (const Option* option = options().find(name, device)) return option->value;
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoll(text, nullptr, 10) : fallback;
}

FAKE_API int fake_take_failure(const char* function, int device) {
  hvdlite::MutexLock lock(options().mutex);
  Option* option = options().find(std::string("FAKE_FAIL_") + function, device);
  if (option == nullptr) return 0;
  ++option->calls;
  return option->at == 0 || option->at == option->calls ? static_cast<int>(option->value) : 0;
}
