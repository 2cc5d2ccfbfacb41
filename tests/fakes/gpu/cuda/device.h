// The devices of the fake driver with their contexts, memory and counters, and the checks that
// every call begins with. Devices live as long as the process. Any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>

#include "base/mutex.h"
#include "cuda/cuda_abi.h"
#include "cuda/handles.h"

namespace fakegpu {

class Stream;

struct Device {
  int ordinal = 0;
  std::atomic<int> retained{0};
  std::atomic<CUresult> sticky{CUDA_SUCCESS};
  std::array<std::atomic<std::int64_t>, sizeof(FakeCounters) / sizeof(std::int64_t)> counters{};

  // The stream that a call means by stream 0; made at the first use.
  std::shared_ptr<Stream> default_stream();

  hvdlite::Mutex mutex;
  std::shared_ptr<Stream> default_ HVDLITE_GUARDED_BY(mutex);
};

#define FAKE_COUNTER(device, name)                                                                 \
  (device).counters[offsetof(FakeCounters, name) / sizeof(std::int64_t)]
#define FAKE_COUNT(device, name, change) FAKE_COUNTER(device, name) += (change)

// nullptr: no such device.
Device* device_at(int ordinal);
// The calling thread's current device; nullptr without a context.
Device* current_device();

// Returns CUDA_SUCCESS, or the error that ends a call at once: the driver is not initialised.
CUresult enter();

// Runs `body(device)` in the calling thread's context.
template <typename Body>
CUresult in_context(Body&& body) {
  if (const CUresult status = enter()) return status;
  Device* device = current_device();
  if (device == nullptr || device->retained <= 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (const CUresult status = device->sticky) return status;
  return body(*device);
}

// The host must not touch a device address: streams use a second mapping of the same pages, the
// *alias*. Returns that of [address, +bytes), or nullptr when it does not lie within one allocation
// that `device` (-1: any) may touch.
char* resolve(int device, std::uint64_t address, std::size_t bytes);

}  // namespace fakegpu
