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

inline constexpr int kMaxDevices = 16;

struct Device {
  int ordinal = 0;
  int physical = 0;  // the device's number in the machine (CUDA_VISIBLE_DEVICES)
  std::atomic<int> retained{0};
  std::atomic<CUresult> sticky{CUDA_SUCCESS};
  std::array<std::atomic<std::int64_t>, sizeof(FakeCounters) / sizeof(std::int64_t)> counters{};

  // The stream that a call means by stream 0; made at the first use.
  std::shared_ptr<Stream> default_stream();

  hvdlite::Mutex mutex;
  std::shared_ptr<Stream> default_ HVDLITE_GUARDED_BY(mutex);
};

#define FAKE_COUNT(device, name, change)                                                           \
  (device).counters[offsetof(FakeCounters, name) / sizeof(std::int64_t)] += (change)

int device_count();
// nullptr: no such device.
Device* device_at(int ordinal);
// The calling thread's current device; nullptr without a context.
Device* current_device();

// Marks the calling thread as one that runs a host function of a stream. In such a function CUDA
// refuses calls of its own interface.
struct HostFunctionScope {
  HostFunctionScope();
  ~HostFunctionScope();
};

// Returns CUDA_SUCCESS, or the error that ends a call at once: the driver is not initialised, the
// call comes from a host function, or a test has asked for a failure (FAKE_FAIL_).
CUresult enter(const char* function);
CUresult enter_device(const char* function, const Device& device);

// Runs `body(device)` in the calling thread's context.
template <typename Body>
CUresult in_context(const char* function, Body&& body) {
  if (const CUresult status = enter(function)) return status;
  Device* device = current_device();
  if (device == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (const CUresult status = enter_device(function, *device)) return status;
  return body(*device);
}

// Memory. The host must not touch a device address: streams use a second mapping of the same pages,
// the *alias*.

struct Block {
  std::uint64_t address = 0;  // as handed out
  char* alias = nullptr;      // equal to the address for page-locked host memory
  std::size_t bytes = 0;
  std::size_t mapped = 0;  // 0: the user's own memory, registered
  int device = 0;
  bool host = false;
};

// The block that holds `address`; alias is nullptr when none does.
Block block_of(std::uint64_t address);
// The alias of [address, +bytes), or nullptr when it does not lie within one block that `device`
// (-1: any) may touch.
char* resolve(int device, std::uint64_t address, std::size_t bytes);

}  // namespace fakegpu
