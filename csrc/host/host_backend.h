// The data planes on CPUs: of ranks on one host and several, and of a world of one. Thread: the
// engine's runner.
#pragma once

#include "base/config.h"
#include "host/adasum.h"
#include "host/allreduce.h"
#include "host/backend.h"
#include "host/plane.h"
#include "host/reducescatter.h"

namespace hvdlite {

// Shared memory between the ranks of a host, channels between hosts. allreduce.h, reducescatter.h,
// copies.h and adasum.h say how each collective runs, plane.h what the words mean, staging.h how
// the ranks of a host wait for each other.
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

// The data plane of a world of one: every collective is a copy, which an all-reduce also scales and
// rounds as it would be with more ranks. It keeps nothing between calls.
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
