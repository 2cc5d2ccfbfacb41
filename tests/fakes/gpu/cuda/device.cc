#include "cuda/device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/stream.h"

namespace fakegpu {
namespace {

std::atomic<bool> initialised{false};
thread_local std::vector<Device*> context_stack;
thread_local int host_function_depth = 0;

struct Devices {
  std::vector<Device*> visible;

  Devices() {
    const int physical = static_cast<int>(
        std::clamp<std::int64_t>(fake_option("FAKE_CUDA_DEVICES", -1, 1), 0, kMaxDevices));
    const char* wanted = std::getenv("CUDA_VISIBLE_DEVICES");
    if (wanted == nullptr) {
      for (int i = 0; i < physical; ++i) add(i);
      return;
    }
    // As the driver does: the list ends at the first entry that names no device.
    for (const char* at = wanted; *at != '\0';) {
      char* end = nullptr;
      const long index = std::strtol(at, &end, 10);
      if (end == at || index < 0 || index >= physical) break;
      add(static_cast<int>(index));
      at = *end == ',' ? end + 1 : end;
    }
  }
  void add(int physical) {
    auto* device = new Device;
    device->ordinal = static_cast<int>(visible.size());
    device->physical = physical;
    visible.push_back(device);
  }
};

Devices& devices() {
  static auto* all = new Devices;  // outlives the streams' threads
  return *all;
}

}  // namespace

int device_count() { return static_cast<int>(devices().visible.size()); }

Device* device_at(int ordinal) {
  return ordinal >= 0 && ordinal < device_count()
             ? devices().visible[static_cast<std::size_t>(ordinal)]
             : nullptr;
}

Device* current_device() { return context_stack.empty() ? nullptr : context_stack.back(); }

std::shared_ptr<Stream> Device::default_stream() {
  hvdlite::MutexLock lock(mutex);
  if (default_ == nullptr) default_ = Stream::start(ordinal, 0);
  return default_;
}

HostFunctionScope::HostFunctionScope() { ++host_function_depth; }
HostFunctionScope::~HostFunctionScope() { --host_function_depth; }

CUresult enter(const char* function) {
  if (const int failure =
          fake_take_failure(function, current_device() ? current_device()->ordinal : -1)) {
    return failure;
  }
  if (host_function_depth > 0) return CUDA_ERROR_NOT_PERMITTED;
  return initialised ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult enter_device(const char*, const Device& device) {
  if (device.retained <= 0) return CUDA_ERROR_INVALID_CONTEXT;
  return device.sticky;
}

}  // namespace fakegpu

using namespace fakegpu;

FAKE_API CUresult cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (const int failure = fake_take_failure("cuInit", -1)) return failure;
  if (device_count() == 0) return CUDA_ERROR_NO_DEVICE;
  initialised = true;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDriverGetVersion(int* version) {
  *version = static_cast<int>(fake_option("FAKE_CUDA_DRIVER_VERSION", -1, 12080));
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetCount(int* count) {
  if (const CUresult status = enter("cuDeviceGetCount")) return status;
  *count = device_count();
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (const CUresult status = enter("cuDeviceGet")) return status;
  *device = ordinal;
  return device_at(ordinal) != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

FAKE_API CUresult cuDeviceGetName(char* name, int length, CUdevice ordinal) {
  if (device_at(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  const std::string text = "Fake GPU " + std::to_string(device_at(ordinal)->physical);
  std::strncpy(name, text.c_str(), static_cast<std::size_t>(length));
  name[length - 1] = '\0';
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice ordinal) {
  if (device_at(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *uuid = {};
  uuid->bytes[0] = 'F';
  uuid->bytes[15] = static_cast<char>(device_at(ordinal)->physical);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice ordinal) {
  if (device_at(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = static_cast<std::size_t>(fake_option("FAKE_CUDA_MEMORY", ordinal, 1LL << 32));
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice ordinal) {
  const Device* device = device_at(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  const int capability = static_cast<int>(fake_option("FAKE_CUDA_CAPABILITY", ordinal, 80));
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 4;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      *value = device->physical + 1;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = capability / 10;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = capability % 10;
      return CUDA_SUCCESS;
    default:
      *value = 0;
      return CUDA_SUCCESS;
  }
}

FAKE_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
  if (const CUresult status = enter("cuDevicePrimaryCtxRetain")) return status;
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

FAKE_API CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags, int* active) {
  const Device* device = device_at(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = device->retained > 0 ? 1 : 0;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxGetCurrent(CUcontext* context) {
  if (const CUresult status = enter("cuCtxGetCurrent")) return status;
  *context = current_device();
  return CUDA_SUCCESS;
}

namespace {
// nullptr when the handle is not a context of this process.
Device* device_of(CUcontext context) {
  for (int i = 0; i < device_count(); ++i) {
    if (device_at(i) == context) return device_at(i);
  }
  return nullptr;
}
}  // namespace

FAKE_API CUresult cuCtxSetCurrent(CUcontext context) {
  if (const CUresult status = enter("cuCtxSetCurrent")) return status;
  if (context != nullptr && device_of(context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context_stack.empty()) context_stack.pop_back();
  if (context != nullptr) context_stack.push_back(device_of(context));
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxPushCurrent_v2(CUcontext context) {
  if (const CUresult status = enter("cuCtxPushCurrent_v2")) return status;
  if (device_of(context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  context_stack.push_back(device_of(context));
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (const CUresult status = enter("cuCtxPopCurrent_v2")) return status;
  if (context_stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = context_stack.back();
  context_stack.pop_back();
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxGetDevice(CUdevice* ordinal) {
  return in_context("cuCtxGetDevice", [&](const Device& device) -> CUresult {
    *ordinal = device.ordinal;
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return in_context("cuCtxGetStreamPriorityRange", [&](const Device&) -> CUresult {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return CUDA_SUCCESS;
  });
}

FAKE_API void fake_counters(int device, FakeCounters* out) {
  std::array<std::int64_t, sizeof(FakeCounters) / sizeof(std::int64_t)> sums{};
  for (int i = 0; i < device_count(); ++i) {
    if (device >= 0 && device != i) continue;
    for (std::size_t c = 0; c < sums.size(); ++c) sums[c] += device_at(i)->counters[c];
  }
  std::memcpy(out, sums.data(), sizeof *out);
}

FAKE_API void fake_count(int device, std::size_t offset, std::int64_t change) {
  device_at(device)->counters[offset / sizeof(std::int64_t)] += change;
}

FAKE_API void fake_set_sticky_error(int device, int error) { device_at(device)->sticky = error; }

FAKE_API int fake_current_device() {
  return current_device() != nullptr ? current_device()->ordinal : 0;
}

FAKE_API int fake_physical_device(int device) { return device_at(device)->physical; }
