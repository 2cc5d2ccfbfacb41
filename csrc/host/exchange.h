// Full-duplex transfers with several ranks at once over channels: everything that can move moves,
// in either direction, so that no order of sends and receives can block for ever.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "base/deadline.h"
#include "base/status.h"
#include "transport/channel.h"
#include "transport/waiter.h"

namespace hvdlite {

// Completes all transfers, and uses them up; those with one rank move one after the other, each way
// by itself. `channels` are those of all
// ranks, by rank. Errors name the rank: kRankFailed, or kTimeout when it made no progress for
// `patience`. Thread: the engine's runner.
Status exchange(std::span<const std::unique_ptr<Channel>> channels, Waiter& waiter,
                std::vector<Transfer>& transfers, Patience patience, const char* operation);

}  // namespace hvdlite
