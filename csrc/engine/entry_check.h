// Local argument checks: errors that do not depend on other ranks. Pure functions; any thread.
#pragma once

#include <string>

#include "base/status.h"
#include "engine/entry.h"
#include "negotiation/process_set.h"

namespace hvdlite {

// "what the call is: why".
Status invalid_call(const Request& request, const std::string& why);
// The same error, with what the call is in front of its message.
Status of_call(const Request& request, const Status& why);
// The error where an operation of this name is in flight.
Status duplicate_name(const Request& request);
// The error of a call, kInvalidArgument. `group` is its process set, null where there is none of
// that number.
Status check_entry(const Entry& entry, const GroupPtr& group, int rank);

}  // namespace hvdlite
