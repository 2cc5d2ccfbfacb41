// The interface of a data plane, as the executor sees it. Implementations: HostBackend (shared
// memory and TCP), SelfBackend (one rank), those of csrc/gpu. One conformance suite tests all of
// them.
//
// One call is one struct. Every member of the group makes the same calls in the same order, which
// negotiation has seen to; fields that may differ between members say so. Only transfer() concerns
// fewer ranks. Spans and references are read until the call returns, and not kept.
//
// Thread: the engine's runner. A call blocks until the result is in place (on a GPU: until the
// device has been given the work), as long as the peers make progress: kTimeout comes when one of
// them makes none for `patience`. Errors: kRankFailed or kTimeout name the peer and are final for
// the backend; kOutOfMemory is not. User memory is written only with results: on error, outputs may
// hold parts of a result.
#pragma once

#include <cstddef>
#include <span>

#include "base/config.h"
#include "base/deadline.h"
#include "base/dtype.h"
#include "base/mutex.h"
#include "base/status.h"
#include "kernels/pieces.h"
#include "trace/trace.h"
#include "transport/topology.h"

namespace hvdlite {

// What messages call a collective.
inline constexpr const char* kAllreduce = "an allreduce";
inline constexpr const char* kReducescatter = "a reducescatter";

// Reduces element i of every piece over the group by the tree of kernels/sum_tree.h, accumulating
// 16-bit floats in float32 and rounding once on each host and once at the end. So the result is the
// same bits on every rank and does not depend on how tensors were batched.
struct Allreduce {
  const Group& group;
  // Where the two differ, both floating-point, elements are cast on the way in and reduced as
  // types.wire, a 16-bit float, and the rounded result is cast back.
  ElementTypes types;
  // kAverage divides the sum by group.divisor() (integers: towards zero), for 16-bit floats on each
  // host first by its number of ranks: so no mean of finite numbers overflows on the way. Integer
  // sums wrap around. kAdasum combines the ranks' pieces one by one as adasum.h says,
  // without a cast.
  ReduceOp op;
  // Addresses and prescales may differ between members. Factors are applied in types.memory: before
  // the one cast, and after the other. A factor times an integer is cut towards zero, and stays
  // within the type.
  std::span<const Piece> pieces;
};

// Concatenates the ranks' bytes in the order of group.ranks.
struct Allgather {
  const Group& group;
  std::span<const std::byte> input;    // what this rank gives
  std::span<const std::size_t> bytes;  // bytes[i] come from group.ranks[i]
  // As long as the sum of `bytes`. The input may be this rank's part of it, and otherwise does not
  // overlap it.
  std::span<std::byte> output;
};

// Copies the root's input into the output of every member.
struct Broadcast {
  const Group& group;
  int root;                          // a rank, member of the group
  std::span<const std::byte> input;  // read on the root only
  std::span<std::byte> output;       // as long as the input on every rank
};

// Sends each member its part of the input, and receives a part from each.
struct Alltoall {
  const Group& group;
  // The parts in the order of group.ranks: send_bytes[i] go to group.ranks[i].
  std::span<const std::byte> input;
  std::span<const std::size_t> send_bytes;
  // receive_bytes[i] come from group.ranks[i]. Members agree pairwise: what one sends is what the
  // other receives. Output and input do not overlap.
  std::span<std::byte> output;
  std::span<const std::size_t> receive_bytes;
};

// Reduces as Allreduce does, bit for bit, and gives each member its block of the result.
struct Reducescatter {
  const Group& group;
  DataType dtype;
  ReduceOp op;
  // The input has piece.count elements, the sum of `counts`; the output has this member's count and
  // does not overlap the input.
  Piece piece;
  // Blocks in the order of group.ranks: counts[i] elements, possibly 0, go to group.ranks[i].
  std::span<const std::uint64_t> counts;
};

// What goes to one rank, and what comes from it; either may be empty.
struct Transfer {
  int rank = -1;
  std::span<const std::byte> outgoing;
  std::span<std::byte> incoming;
};

class Backend {
 public:
  static constexpr const char* kTraceRow = "engine";  // where the engine draws its batches

  virtual ~Backend() = default;
  // Called once, before the first collective, with what outlives the backend: the parts of a
  // collective may be drawn on its row kTraceRow (TraceSpan), a device's on a row of its own
  // (Trace::span).
  virtual void trace_to(Trace&) {}
  // Counts from now on the bytes that this rank sends to ranks of other hosts, and those that the
  // ranks of a host reduce without staging (host/allreduce.h).
  virtual void count_in(Counter& /*to_other_hosts*/, Counter& /*unstaged*/) {}

  virtual Status allreduce(const Allreduce& call, Patience patience) = 0;
  // Whether allreduce() by this op makes the copies that pieces ask for (Piece::copy): each part of
  // an input before that part is overwritten, and of the other parts none.
  virtual bool copies_inputs(ReduceOp /*op*/) const { return false; }
  virtual Status allgather(const Allgather& call, Patience patience) = 0;
  // Several allgathers of one group, at least one, which may travel together.
  virtual Status allgathers(std::span<const Allgather> calls, Patience patience) {
    for (const Allgather& call : calls) HVDLITE_RETURN_IF_ERROR(allgather(call, patience));
    return Status();
  }
  virtual Status broadcast(const Broadcast& call, Patience patience) = 0;
  virtual Status alltoall(const Alltoall& call, Patience patience) = 0;
  virtual Status reducescatter(const Reducescatter& call, Patience patience) = 0;
  // Moves bytes of host memory between this rank and others, of which nobody else knows. Transfers
  // with one rank move in the order in which both ranks have them, and those with different ranks
  // at the same time: so ranks may cut the transfers that they have in common into calls as each
  // likes, where no collective of theirs lies between.
  virtual Status transfer(std::span<const Transfer> /*transfers*/, Patience /*patience*/) {
    return Status(StatusCode::kInternal, "this data plane makes no transfers");
  }
  // Returns when every member has called it.
  virtual Status barrier(const Group& group, Patience patience) = 0;
  // The collectives from here on use these settings, on every rank alike.
  virtual void tune(const Tunables& /*tunables*/) {}
  // No collective of this group follows.
  virtual void forget(const Group& /*group*/) {}
};

}  // namespace hvdlite
