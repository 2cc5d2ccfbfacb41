// Registrations of buffers with communicators, and their faults, which FakeCounters counts.
// Any thread.
#pragma once

#include "nccl/communicator.h"

namespace fakegpu {

ncclResult_t register_buffer(void* communicator, void* buffer, std::size_t bytes, void** out);
ncclResult_t deregister_buffer(void* communicator, void* registration);
// Ends the registrations of a communicator that ends. Any that is left is a fault, unless the
// communicator is aborted.
void end_registrations(void* communicator, bool abort);
// The device memory that begins here is about to be freed. It is a fault if any of it is
// registered.
void note_freed(const void* memory);

}  // namespace fakegpu
