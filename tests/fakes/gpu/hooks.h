// What a test says to the doubles of libcuda and libnccl, besides calling them as libraries. All
// are exported by the double of libcuda.so.1; a test finds them with dlsym. Thread: any.
#pragma once

#include <cstddef>
#include <cstdint>

#define FAKE_API extern "C" __attribute__((visibility("default")))

// What lives now, and what was done since the process began.
struct FakeCounters {
  std::int64_t live_allocations;
  std::int64_t live_bytes;
  std::int64_t live_host_allocations;  // cuMemAllocHost and cuMemHostRegister
  std::int64_t live_streams;           // default streams are not counted
  std::int64_t live_events;
  std::int64_t live_modules;
  std::int64_t live_contexts;  // primary contexts retained and not yet released
  std::int64_t live_communicators;
  std::int64_t live_registrations;   // of buffers with communicators, and windows
  std::int64_t registrations;        // made so far
  std::int64_t registration_faults;  // the same memory twice with one communicator; memory freed,
                                     // or a communicator destroyed, before they were ended
  std::int64_t live_reduce_ops;      // ncclRedOpCreatePreMulSum
  std::int64_t kernel_launches;      // cuLaunchKernel
  std::int64_t collective_launches;  // launches that NCCL would make: one for each group
  std::int64_t copies;               // asynchronous ones
  std::int64_t memsets;
  std::int64_t host_functions;  // cuLaunchHostFunc
  std::int64_t event_records;
  std::int64_t stream_waits;         // cuStreamWaitEvent
  std::int64_t queries;              // cuEventQuery and cuStreamQuery
  std::int64_t host_syncs;           // calls that make the host wait for the device
  std::int64_t default_stream_work;  // kernels, copies, memsets, collectives given to it
};

struct FakeLaunch {
  unsigned grid[3];
  unsigned block[3];
  int device;
};
// Runs on the stream's thread. `params` is a copy of the kernel's one parameter. Returns 0, or the
// CUDA error that the launch leaves behind.
using FakeKernelBody = int (*)(const void* params, const FakeLaunch* launch);

// Adds up the counters of one device, or of all (-1).
FAKE_API void fake_counters(int device, FakeCounters* out);
// Device memory, read or written at once, past all streams. False when [address, +bytes) is not
// wholly within one allocation.
FAKE_API bool fake_read(std::uint64_t address, void* out, std::size_t bytes);
FAKE_API bool fake_write(std::uint64_t address, const void* bytes_in, std::size_t bytes);
// Every later operation of the stream (nullptr: the current device's default stream) first waits so
// long. False: no such stream.
FAKE_API bool fake_delay_stream(void* stream, unsigned microseconds);
// While held, the stream starts nothing. A test that holds the producer's stream and sees what the
// others do needs no timing.
FAKE_API bool fake_hold_stream(void* stream, bool held);
FAKE_API bool fake_set_capturing(void* stream, bool capturing);
// The kernel `name` becomes available to modules that declare it, with one parameter of that size.
FAKE_API void fake_register_kernel(const char* name, std::size_t param_bytes, FakeKernelBody body);
// Every later call on the device fails with `error`, as after a fault in a kernel. 0 ends that.
FAKE_API void fake_set_sticky_error(int device, int error);
// Sets an option (README.md lists them) for one device or all (-1); nullptr: what the environment
// says. An option of one device goes before one of all.
FAKE_API void fake_set_option(const char* name, int device, const char* value);

// For the double of libnccl.

FAKE_API std::int64_t fake_option(const char* name, int device, std::int64_t fallback);
// The error that a call of `function` is to fail with now, or 0: see FAKE_FAIL_ in README.md.
FAKE_API int fake_take_failure(const char* function, int device);
// A pointer through which the double itself may touch device memory or page-locked host memory
// that `device` may touch; nullptr for anything else.
FAKE_API void* fake_resolve(int device, const void* address, std::size_t bytes);
// Puts work of NCCL on a stream of `device`; a CUDA error when there is no such stream on it.
FAKE_API int fake_put(void* stream, int device, void (*work)(void*), void* argument);
// The calling thread's device, as the runtime library sees it: 0 without a context.
FAKE_API int fake_current_device();
FAKE_API int fake_physical_device(int device);
// Adds to the counter at this offset in FakeCounters.
FAKE_API void fake_count(int device, std::size_t offset, std::int64_t change);
