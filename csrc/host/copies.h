// The collectives of the host data plane that only copy. Thread: the engine's runner.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>

#include "host/backend.h"
#include "host/plane.h"

namespace hvdlite {

// Copies bytes that need not move where they already lie.
inline void copy_bytes(std::span<const std::byte> from, std::byte* to) {
  if (!from.empty() && from.data() != to) std::memmove(to, from.data(), from.size());
}

// The root sends each chunk to one member of every other host; these members publish it there.
Status host_broadcast(HostPlane& plane, const Broadcast& call, Patience patience);
// Through the staging buffers within a host; between hosts in steps, in each of which every rank
// sends to one other and receives from one.
Status host_alltoall(HostPlane& plane, const Alltoall& call, Patience patience);
// The locals meet, then the first ones of the hosts, then the locals again.
Status host_barrier(HostPlane& plane, const Group& group, Patience patience);

// The allgather of one group, at least one, of tensors that travel together.
//
// Words: the *run* of a host is what its members give, one behind the other. (1) Within a host, the
// members give each other their blocks. (2) Each driver takes one slice of every host's run around
// a ring of hosts: it sends that of its own host to the next host, and passes on what comes from
// the host before, piece by piece, while the next piece is on its way. Little data goes from each
// host to all others at once instead. (3) Within a host, the drivers hand on what they have
// received. Bytes cross each link once, from output to output.
Status host_allgather(HostPlane& plane, std::span<const Allgather> calls, Patience patience);

}  // namespace hvdlite
