// Registrations of buffers with communicators; windows are the same here.
#pragma once

#include "nccl/communicator.h"

namespace fakegpu {

ncclResult_t register_buffer(void* communicator, void* buffer, std::size_t bytes, void** out);
ncclResult_t deregister_buffer(void* communicator, void* registration);
// The communicator ends, and what is registered with it: a fault unless it is aborted.
void end_registrations(void* communicator, bool abort);
// Memory of a device that begins here is freed: a fault where some of it is registered.
void note_freed(const void* memory);

}  // namespace fakegpu
