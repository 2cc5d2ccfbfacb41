#include "cuda/device.h"

#include <cstring>
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
