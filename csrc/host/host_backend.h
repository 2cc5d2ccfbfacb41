// The data plane on CPUs: shared memory between the ranks of a host, channels between hosts.
//
// allreduce.h, allgather.h, reducescatter.h and copies.h say how each collective runs, layout.h
// what the words mean, staging.h how the ranks of a host wait for each other. Thread: the engine's
// runner.
#pragma once

#include "base/config.h"
#include "host/adasum_reduction.h"
#include "host/allreduce.h"
#include "host/backend.h"
#include "host/layout.h"
#include "host/plane.h"
#include "host/reducescatter.h"

namespace hvdlite {

class HostBackend : public Backend {
 public:
  HostBackend(Fabric& fabric, const Config& config);  // the fabric is borrowed
  // Its parts refer to each other.
  HostBackend(const HostBackend&) = delete;
  HostBackend& operator=(const HostBackend&) = delete;

  void trace_to(Trace& trace) override { plane_.trace_to(trace, kTraceRow); }
  void count_in(Counter& to_other_hosts, Counter& unstaged) override {
    plane_.count_in(to_other_hosts, unstaged);
  }
  Status allreduce(const Allreduce& call, Patience patience) override;
  bool copies_inputs(ReduceOp op) const override { return op != ReduceOp::kAdasum; }
  Status allgather(const Allgather& call, Patience patience) override;
  Status allgathers(std::span<const Allgather> calls, Patience patience) override;
  Status broadcast(const Broadcast& call, Patience patience) override;
  Status alltoall(const Alltoall& call, Patience patience) override;
  Status reducescatter(const Reducescatter& call, Patience patience) override;
  Status transfer(std::span<const Transfer> transfers, Patience patience) override;
  Status barrier(const Group& group, Patience patience) override;
  void tune(const Tunables& tunables) override { plane_.tune(tunables); }
  void forget(const Group& group) override { layouts_.forget(group); }

 private:
  HostPlane plane_;
  HostLayouts layouts_;
  HostAllreduce allreduce_;
  HostReducescatter reducescatter_;
  AdasumReduction adasum_;
};

}  // namespace hvdlite
