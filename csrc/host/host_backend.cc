#include "host/host_backend.h"

#include <algorithm>
#include <cstring>

#include "host/copies.h"
#include "kernels/reduce.h"

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

namespace {

void copy(std::span<const std::byte> from, std::span<std::byte> to) {
  if (!to.empty() && from.data() != to.data()) std::memcpy(to.data(), from.data(), to.size());
}

// The average of one rank's values and of nothing from those that have joined.
void divide(DataType dtype, void* values, std::size_t count, int divisor) {
  const void* source = values;
  reduce(dtype, ReduceOp::kAverage, {&source, 1}, values, count, {divisor});
}

// Rounds as more ranks would.
void cast_and_back(ElementTypes types, const Piece& piece, int divisor) {
  constexpr std::size_t kBlock = 1024;
  std::byte narrow[kBlock * sizeof(std::uint16_t)];
  const std::size_t element_bytes = size_of(types.memory);
  for (std::size_t at = 0; at < piece.count; at += kBlock) {
    const std::size_t count = std::min(kBlock, piece.count - at);
    scale_copy(types, static_cast<const std::byte*>(piece.input) + at * element_bytes, narrow,
               count, piece.prescale);
    if (divisor != 1) divide(types.wire, narrow, count, divisor);
    scale_copy({types.wire, types.memory}, narrow,
               static_cast<std::byte*>(piece.output) + at * element_bytes, count, piece.postscale);
  }
}

}  // namespace

Status SelfBackend::allreduce(const Allreduce& call, Patience) {
  const ElementTypes types = call.types;
  const int divisor = call.op == ReduceOp::kAverage ? call.group.divisor() : 1;
  for (const Piece& piece : call.pieces) {
    if (types.cast()) {
      cast_and_back(types, piece, divisor);
      continue;
    }
    scale_copy(types, piece.input, piece.output, piece.count, piece.prescale);
    if (divisor != 1) divide(types.memory, piece.output, piece.count, divisor);
    scale_copy(types, piece.output, piece.output, piece.count, piece.postscale);
  }
  return Status();
}

Status SelfBackend::allgather(const Allgather& call, Patience) {
  copy(call.input, call.output);
  return Status();
}

Status SelfBackend::broadcast(const Broadcast& call, Patience) {
  copy(call.input, call.output);
  return Status();
}

Status SelfBackend::alltoall(const Alltoall& call, Patience) {
  copy(call.input, call.output);
  return Status();
}

Status SelfBackend::reducescatter(const Reducescatter& call, Patience patience) {
  return SelfBackend::allreduce({call.group, call.dtype, call.op, {&call.piece, 1}}, patience);
}

}  // namespace hvdlite
