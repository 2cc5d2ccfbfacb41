// The functions by which a test observes and steers the fake libcuda and libnccl, besides calling
// them as libraries. The fake libcuda.so.1 exports all of them; a test finds them with dlsym. Any
// thread.
#pragma once

#include <cstddef>
#include <cstdint>

#define FAKE_API extern "C" __attribute__((visibility("default")))

// Counts of the objects that live now, and of the calls since the process began.
struct FakeCounters {
  std::int64_t live_allocations;
  std::int64_t live_bytes;
  std::int64_t allocations;   // made so far
  std::int64_t live_streams;  // default streams are not counted
  std::int64_t live_events;
  std::int64_t live_modules;
  std::int64_t live_contexts;  // primary contexts retained and not yet released
  std::int64_t live_communicators;
  std::int64_t live_registrations;   // of buffers with communicators
  std::int64_t registrations;        // made so far
  std::int64_t registration_faults;  // the same memory twice with one communicator; memory freed
                                     // or a communicator destroyed while it is registered
  std::int64_t live_reduce_ops;      // ncclRedOpCreatePreMulSum
  std::int64_t kernel_launches;      // cuLaunchKernel
  std::int64_t collective_launches;  // launches that NCCL would make: one for each group
  std::int64_t event_records;
  std::int64_t host_syncs;           // calls that make the host wait for the device
  std::int64_t default_stream_work;  // kernels, copies, memsets, collectives given to it
};

// Adds up the counters of one device, or of all (-1).
FAKE_API void fake_counters(int device, FakeCounters* out);
// A stream that is held starts nothing. A test that holds the producer's stream and looks at what
// the other streams do needs no timing. nullptr is the current device's default stream. False when
// there is no such stream.
FAKE_API bool fake_hold_stream(void* stream, bool held);
FAKE_API bool fake_set_capturing(void* stream, bool capturing);
// Sets an option (README.md lists them) for one device or all (-1). With nullptr the environment
// decides again. An option of one device goes before one of all.
FAKE_API void fake_set_option(const char* name, int device, const char* value);

// The fake libnccl calls the functions below.

FAKE_API std::int64_t fake_option(const char* name, int device, std::int64_t fallback);
// The error with which this call of `function` must fail, or 0: see FAKE_FAIL_ in README.md.
FAKE_API int fake_take_failure(const char* function, int device);
// A pointer through which the fakes themselves may touch memory of `device`; nullptr for anything
// else.
FAKE_API void* fake_resolve(int device, const void* address, std::size_t bytes);
// Puts work of NCCL on a stream of `device`; a CUDA error when there is no such stream on it.
FAKE_API int fake_put(void* stream, int device, void (*work)(void*), void* argument);
// The calling thread's device, as the runtime library sees it: 0 without a context.
FAKE_API int fake_current_device();
// Adds to the counter at this offset in FakeCounters.
FAKE_API void fake_count(int device, std::size_t offset, std::int64_t change);
