// The data plane of a world of one: copies and scales.
#pragma once

#include "backend/backend.h"

namespace hvdlite {

class SelfBackend : public Backend {
 public:
  std::string_view name() const override { return "self"; }
  Status allreduce(const Allreduce& call, Patience patience) override;
  Status allgather(const Allgather& call, Patience patience) override;
  Status broadcast(const Broadcast& call, Patience patience) override;
  Status alltoall(const Alltoall& call, Patience patience) override;
  Status reducescatter(const Reducescatter& call, Patience patience) override;
  Status barrier(const Group&, Patience) override { return Status(); }
};

}  // namespace hvdlite
