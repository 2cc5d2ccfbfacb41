#include "host/host_backend.h"

#include "host/allgather.h"
#include "host/copies.h"

namespace hvdlite {

HostBackend::HostBackend(Fabric& fabric, const Config& config)
    : plane_(fabric, config),
      layouts_(fabric.topology),
      allreduce_(plane_),
      reducescatter_(plane_) {}

Status HostBackend::allreduce(const Allreduce& call, Patience patience) {
  if (call.op == ReduceOp::kAdasum) return adasum_.run(*this, plane_.rank(), call, patience);
  return allreduce_.run(layouts_.of(call.group), call, patience);
}

Status HostBackend::allgather(const Allgather& call, Patience patience) {
  return HostAllgather(plane_, layouts_.of(call.group), patience).run({&call, 1});
}

Status HostBackend::allgathers(std::span<const Allgather> calls, Patience patience) {
  return HostAllgather(plane_, layouts_.of(calls[0].group), patience).run(calls);
}

Status HostBackend::broadcast(const Broadcast& call, Patience patience) {
  return host_broadcast(plane_, layouts_.of(call.group), call, patience);
}

Status HostBackend::alltoall(const Alltoall& call, Patience patience) {
  return host_alltoall(plane_, layouts_.of(call.group), call, patience);
}

Status HostBackend::reducescatter(const Reducescatter& call, Patience patience) {
  return reducescatter_.run(layouts_.of(call.group), call, patience);
}

Status HostBackend::transfer(std::span<const Transfer> transfers, Patience patience) {
  return plane_.exchange_with_ranks(transfers, patience, "a send");
}

Status HostBackend::barrier(const Group& group, Patience patience) {
  return host_barrier(plane_, layouts_.of(group), patience);
}

}  // namespace hvdlite
