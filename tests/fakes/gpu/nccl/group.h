// The calls of one thread between ncclGroupStart and ncclGroupEnd, which take effect at the end.
#pragma once

#include <functional>
#include <memory>

#include "nccl/communicator.h"

namespace fakegpu {

void begin_group();
ncclResult_t end_group();

// Checks one operation, and launches it at once or with its group.
ncclResult_t submit(const char* function, void* communicator, void* stream, Operation operation);

// Runs `work`, which makes or changes a communicator. It runs in a thread of its own where the
// communicator is non-blocking (this returns ncclInProgress) or a group is open (the group's end
// waits for it), otherwise here. The result of `work` becomes the communicator's error.
ncclResult_t progress(const std::shared_ptr<Communicator>& communicator,
                      std::function<ncclResult_t()> work);

}  // namespace fakegpu
