// Symmetric windows.
#include "nccl/registration.h"

using namespace fakegpu;

FAKE_API ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void* buffer, std::size_t bytes,
                                             ncclWindow_t* out, int) {
  return register_buffer(handle, buffer, bytes, out);
}

FAKE_API ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t window) {
  return deregister_buffer(handle, window);
}
