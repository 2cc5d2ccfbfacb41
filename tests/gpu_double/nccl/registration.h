// Registrations of buffers with communicators; windows are the same here.
#pragma once

#include "nccl/communicator.h"

namespace fakegpu {

ncclResult_t register_buffer(void* communicator, void* buffer, std::size_t bytes, void** out);
ncclResult_t deregister_buffer(void* communicator, void* registration);

}  // namespace fakegpu
