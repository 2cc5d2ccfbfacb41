// What an engine has done so far. The runner counts up; any thread reads.
#pragma once

#include "base/counter.h"

namespace hvdlite {

struct Counters {
  Counter batches;
  Counter tensors;
  Counter bytes;
  Counter cache_hits;
  Counter full_requests;
  Counter messages_sent;         // on the control plane
  Counter bytes_to_other_hosts;  // The host's data plane counts them (Backend::count_in).
  Counter bytes_unstaged;        // The host's data plane counts them, too.
  Counter exchange_us;           // from the begin to the end here of batches that count in steps
};

}  // namespace hvdlite
