// The data plane of a world of one: every collective is a copy, which an all-reduce also scales and
// rounds as it would be with more ranks. It keeps nothing between calls. Thread: the engine's
// runner.
#pragma once

#include "host/backend.h"

namespace hvdlite {

class SelfBackend : public Backend {
 public:
  Status allreduce(const Allreduce& call, Patience patience) override;
  Status allgather(const Allgather& call, Patience patience) override;
  Status broadcast(const Broadcast& call, Patience patience) override;
  Status alltoall(const Alltoall& call, Patience patience) override;
  Status reducescatter(const Reducescatter& call, Patience patience) override;
  Status barrier(const Group&, Patience) override { return Status(); }
};

}  // namespace hvdlite
