// The collectives of the host data plane that only copy, but for allgather.h. Of each, `layout` is
// that of the call's group. Thread: the engine's runner.
#pragma once

#include "host/backend.h"
#include "host/layout.h"
#include "host/plane.h"

namespace hvdlite {

// The root sends each chunk to one member of every other host; these members publish it there.
Status host_broadcast(HostPlane& plane, const HostLayout& layout, const Broadcast& call,
                      Patience patience);
// Through the staging buffers within a host; between hosts in steps, in each of which every rank
// sends to one other and receives from one.
Status host_alltoall(HostPlane& plane, const HostLayout& layout, const Alltoall& call,
                     Patience patience);
// The locals meet, then the first ones of the hosts, then the locals again.
Status host_barrier(HostPlane& plane, const HostLayout& layout, Patience patience);

}  // namespace hvdlite
