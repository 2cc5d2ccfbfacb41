// Memory that NCCL hands out, and registration of buffers.
#include "nccl/registration.h"

extern "C" int cuMemAlloc_v2(unsigned long long* out, std::size_t bytes);
extern "C" int cuMemFree_v2(unsigned long long address);

using namespace fakegpu;

FAKE_API ncclResult_t ncclMemAlloc(void** out, std::size_t bytes) {
  if (const int failure = fake_take_failure("ncclMemAlloc", fake_current_device())) {
    return fail(static_cast<ncclResult_t>(failure), "injected failure of ncclMemAlloc");
  }
  unsigned long long address = 0;
  if (const int error = cuMemAlloc_v2(&address, bytes)) {
    return fail(ncclUnhandledCudaError,
                "Cuda failure " + std::to_string(error) + (error == 2 ? " 'out of memory'" : ""));
  }
  *out = reinterpret_cast<void*>(address);
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclMemFree(void* address) {
  note_freed(address);
  const int error = cuMemFree_v2(reinterpret_cast<unsigned long long>(address));
  return error == 0 ? ncclSuccess
                    : fail(ncclUnhandledCudaError, "Cuda failure " + std::to_string(error));
}

FAKE_API ncclResult_t ncclCommRegister(ncclComm_t handle, void* buffer, std::size_t bytes,
                                       void** out) {
  return register_buffer(handle, buffer, bytes, out);
}

FAKE_API ncclResult_t ncclCommDeregister(ncclComm_t handle, void* registration) {
  return deregister_buffer(handle, registration);
}
