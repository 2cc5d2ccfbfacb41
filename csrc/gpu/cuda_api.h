// The part of NVIDIA's driver interface that the core uses: a table of symbols that are found at
// run time in libcuda.so.1 (base/dylib.h). The build needs no CUDA, and a machine without a driver
// only lacks this table.
//
// The declarations are ours; values and layouts are the stable binary interface of the driver. A
// table is immutable once loaded, and any thread may call through it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/dylib.h"
#include "base/status.h"

namespace hvdlite {

using CudaContext = struct CudaContextTag*;
using CudaStream = struct CudaStreamTag*;  // A null one is the context's default stream.
using CudaEventHandle = struct CudaEventTag*;
using CudaModule = struct CudaModuleTag*;
using CudaFunction = struct CudaFunctionTag*;
using CudaPointer = std::uint64_t;
// The driver's form of an address.
inline CudaPointer address(const void* pointer) {
  return reinterpret_cast<CudaPointer>(pointer);  // NOLINT
}
inline void* pointer(CudaPointer address) {
  return reinterpret_cast<void*>(address);  // NOLINT: a device address
}
struct CudaUuid {
  unsigned char bytes[16];
  bool operator==(const CudaUuid&) const = default;
};

inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaOutOfMemory = 2;
inline constexpr int kCudaNotReady = 600;
inline constexpr unsigned kCudaStreamNonBlocking = 1;
inline constexpr unsigned kCudaEventDisableTiming = 2;
inline constexpr int kCudaMultiprocessorCount = 16;  // an attribute of a device
inline constexpr int kCudaPointerOrdinal = 9;        // an attribute of an address
inline constexpr int kOldestCudaDriver = 11000;

// X(field, symbol, arguments): every function returns a CUresult, 0 for success.
#define HVDLITE_CUDA_SYMBOLS(X)                                                                    \
  X(init, "cuInit", (unsigned flags))                                                              \
  X(driver_version, "cuDriverGetVersion", (int* version))                                          \
  X(error_name, "cuGetErrorName", (int error, const char** name))                                  \
  X(error_string, "cuGetErrorString", (int error, const char** text))                              \
  X(device_count, "cuDeviceGetCount", (int* count))                                                \
  X(device_get, "cuDeviceGet", (int* device, int ordinal))                                         \
  X(device_attribute, "cuDeviceGetAttribute", (int* value, int attribute, int device))             \
  X(device_uuid, "cuDeviceGetUuid_v2", (CudaUuid * uuid, int device))                              \
  X(context_retain, "cuDevicePrimaryCtxRetain", (CudaContext * context, int device))               \
  X(context_release, "cuDevicePrimaryCtxRelease_v2", (int device))                                 \
  X(context_current, "cuCtxGetCurrent", (CudaContext * context))                                   \
  X(context_make_current, "cuCtxSetCurrent", (CudaContext context))                                \
  X(context_device, "cuCtxGetDevice", (int* device))                                               \
  X(context_synchronize, "cuCtxSynchronize", ())                                                   \
  X(priority_range, "cuCtxGetStreamPriorityRange", (int* least, int* greatest))                    \
  X(memory_allocate, "cuMemAlloc_v2", (CudaPointer * memory, std::size_t bytes))                   \
  X(memory_free, "cuMemFree_v2", (CudaPointer memory))                                             \
  X(pointer_attribute, "cuPointerGetAttribute", (void* value, int attribute, CudaPointer address)) \
  X(copy, "cuMemcpyAsync",                                                                         \
    (CudaPointer to, CudaPointer from, std::size_t bytes, CudaStream stream))                      \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2",                                                        \
    (CudaPointer to, const void* from, std::size_t bytes, CudaStream stream))                      \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2",                                                          \
    (void* to, CudaPointer from, std::size_t bytes, CudaStream stream))                            \
  X(fill, "cuMemsetD8Async",                                                                       \
    (CudaPointer memory, unsigned char value, std::size_t bytes, CudaStream stream))               \
  X(stream_create, "cuStreamCreateWithPriority",                                                   \
    (CudaStream * stream, unsigned flags, int priority))                                           \
  X(stream_destroy, "cuStreamDestroy_v2", (CudaStream stream))                                     \
  X(stream_wait, "cuStreamWaitEvent", (CudaStream stream, CudaEventHandle event, unsigned flags))  \
  X(stream_capturing, "cuStreamIsCapturing", (CudaStream stream, int* status))                     \
  X(event_create, "cuEventCreate", (CudaEventHandle * event, unsigned flags))                      \
  X(event_destroy, "cuEventDestroy_v2", (CudaEventHandle event))                                   \
  X(event_record, "cuEventRecord", (CudaEventHandle event, CudaStream stream))                     \
  X(event_query, "cuEventQuery", (CudaEventHandle event))                                          \
  X(event_elapsed, "cuEventElapsedTime",                                                           \
    (float* milliseconds, CudaEventHandle from, CudaEventHandle to))                               \
  X(module_load, "cuModuleLoadData", (CudaModule * module, const void* image))                     \
  X(module_unload, "cuModuleUnload", (CudaModule module))                                          \
  X(module_function, "cuModuleGetFunction",                                                        \
    (CudaFunction * function, CudaModule module, const char* name))                                \
  X(launch, "cuLaunchKernel",                                                                      \
    (CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,   \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, CudaStream stream,                 \
     void** parameters, void** extra))

struct CudaApi {
#define HVDLITE_CUDA_FIELD(field, symbol, arguments) int(*field) arguments = nullptr;
  HVDLITE_CUDA_SYMBOLS(HVDLITE_CUDA_FIELD)
#undef HVDLITE_CUDA_FIELD

  std::string path;  // The library was opened from it.
  int version = 0;   // the CUDA version of the driver: 12040 is 12.4
  int devices = 0;   // the number that this process may use, at least 1
  Dylib library;     // keeps the functions alive

  // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  std::string describe(int error) const;
  // OK, or a status with `what` and the error: kOutOfMemory when memory is what lacks, kInternal
  // for any other error.
  Status check(int error, const std::string& what) const;

  // Loads `library` ("" means libcuda.so.1) and starts the driver. kInvalidArgument says why this
  // process can use no GPU: there is no driver, the driver is too old, or there is no device.
  static Result<std::shared_ptr<const CudaApi>> load(const std::string& library);
};

// "12.4" of 12040.
std::string cuda_version_text(int version);

}  // namespace hvdlite
