// The data planes on CPUs: of ranks on one host and several, and of a world of one. Thread: the
// engine's runner.
#pragma once

#include "base/config.h"
#include "host/adasum.h"
#include "host/allreduce.h"
#include "host/backend.h"
#include "host/copies.h"
#include "host/plane.h"
#include "host/reducescatter.h"

namespace hvdlite {

// Shared memory between the ranks of a host, channels between hosts. allreduce.h, reducescatter.h,
// copies.h and adasum.h say how each collective runs, plane.h what the words mean, staging.h how
// the ranks of a host wait for each other.
class HostBackend : public Backend {
 public:
  HostBackend(Fabric& fabric, const Config& config)  // the fabric is borrowed
      : plane_(fabric, config), allreduce_(plane_), reducescatter_(plane_) {}
  // Its parts refer to each other.
  HostBackend(const HostBackend&) = delete;
  HostBackend& operator=(const HostBackend&) = delete;

  void trace_to(Trace& trace) override { plane_.trace_to(trace, kTraceRow); }
  void count_in(Counter& to_other_hosts, Counter& unstaged) override {
    plane_.count_in(to_other_hosts, unstaged);
  }
  Status allreduce(const Allreduce& call, Patience patience) override {
    if (call.op == ReduceOp::kAdasum) return adasum_.run(*this, plane_.rank(), call, patience);
    return allreduce_.run(call, patience);
  }
  bool copies_inputs(ReduceOp op) const override { return op != ReduceOp::kAdasum; }
  Status allgather(const Allgather& call, Patience patience) override {
    return allgathers({&call, 1}, patience);
  }
  Status allgathers(std::span<const Allgather> calls, Patience patience) override {
    return host_allgather(plane_, calls, patience);
  }
  Status broadcast(const Broadcast& call, Patience patience) override {
    return host_broadcast(plane_, call, patience);
  }
  Status alltoall(const Alltoall& call, Patience patience) override {
    return host_alltoall(plane_, call, patience);
  }
  Status reducescatter(const Reducescatter& call, Patience patience) override {
    return reducescatter_.run(call, patience);
  }
  Status transfer(std::span<const Transfer> transfers, Patience patience) override {
    return plane_.exchange().transfer(transfers, patience, "a send");
  }
  Status barrier(const Group& group, Patience patience) override {
    return host_barrier(plane_, group, patience);
  }
  void tune(const Tunables& tunables) override { plane_.tune(tunables); }
  void forget(const Group& group) override { plane_.forget(group); }

 private:
  HostPlane plane_;
  HostAllreduce allreduce_;
  HostReducescatter reducescatter_;
  AdasumReduction adasum_;
};

// The data plane of a group of one rank, but for its reductions: every collective is a copy. It
// keeps nothing between calls. `Base` is Backend, or an interface derived from it.
template <typename Base>
class SelfPlane : public Base {
 public:
  Status allgather(const Allgather& call, Patience) override {
    return copy(call.input, call.output);
  }
  Status broadcast(const Broadcast& call, Patience) override {
    return copy(call.input, call.output);
  }
  Status alltoall(const Alltoall& call, Patience) override { return copy(call.input, call.output); }
  Status reducescatter(const Reducescatter& call, Patience patience) override {
    return this->allreduce({call.group, call.dtype, call.op, {&call.piece, 1}}, patience);
  }
  Status barrier(const Group&, Patience) override { return Status(); }

 protected:
  // Copies bytes that need not move where they already lie.
  virtual Status copy(std::span<const std::byte> from, std::span<std::byte> to) = 0;
};

// The data plane of a world of one. An all-reduce also scales and rounds as it would with more
// ranks.
class SelfBackend : public SelfPlane<Backend> {
 public:
  Status allreduce(const Allreduce& call, Patience patience) override;

 private:
  Status copy(std::span<const std::byte> from, std::span<std::byte> to) override {
    copy_bytes(from.first(to.size()), to.data());
    return Status();
  }
};

}  // namespace hvdlite
