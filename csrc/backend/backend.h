// What the executor sees of a data plane. Implementations: host_backend (shared memory and TCP),
// self_backend (one rank), fake_backend (tests). One conformance suite tests them all.
//
// Every member of the group calls the same function with the same arguments but for the addresses
// (and scales, and what alltoall says of its own parts), in the same order: negotiation has seen to
// that. Thread: the engine's runner. Calls block until the result is in place, as long as the peers
// make progress: kTimeout comes when one of them makes none for `patience`. Errors: kRankFailed or
// kTimeout name the peer and are final for the backend; kOutOfMemory is not. User memory is written
// only with results: on error, outputs may hold parts of a result.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "base/deadline.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/tunables.h"
#include "kernels/pieces.h"
#include "trace/trace.h"
#include "transport/topology.h"

namespace hvdlite {

// What messages call a collective.
inline constexpr const char* kAllreduce = "an allreduce";
inline constexpr const char* kReducescatter = "a reducescatter";

// Whether a backend can run here, and if not, why: shown by `hvdlite-run --doctor`.
struct Viability {
  bool ok = true;
  std::string reason;
};

class Backend {
 public:
  static constexpr const char* kTraceRow = "engine";  // where the engine draws its batches

  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  virtual Viability viable() const = 0;
  // Called once, before the first collective, with what outlives the backend: the parts of a
  // collective may be drawn on its row kTraceRow (TraceSpan), a device's on a row of its own
  // (Trace::span).
  virtual void trace_to(Trace&) {}

  // Reduces element i of every piece over the group, in ascending rank order (within a host; then
  // host by host), accumulating 16-bit floats in float32 and rounding once per level. So the result
  // is the same bits on every rank and does not depend on how tensors were batched. kAverage
  // divides the sum by group.divisor() (integers: towards zero), for 16-bit floats on each host
  // first by its number of ranks: so no mean of finite numbers overflows on the way. Integer sums
  // wrap around; a factor times an integer is cut towards zero, and stays within the type.
  // Where the types differ, both floating-point, elements are cast on the way in and reduced as
  // types.wire, a 16-bit float, and the rounded result is cast back. The factors of a piece are
  // applied in types.memory: before the one cast, and after the other.
  // kAdasum combines the ranks' pieces one by one as adasum_reduction.h says, without a cast.
  virtual Status allreduce(const Group& group, ElementTypes types, ReduceOp op,
                           std::span<const Piece> pieces, Patience patience) = 0;
  // Concatenates the ranks' bytes in the order of group.ranks: bytes[i] from group.ranks[i] (equal
  // to this rank's own length at its own index) into `output`, which holds their sum.
  virtual Status allgather(const Group& group, std::span<const std::byte> input,
                           std::span<const std::size_t> bytes, std::span<std::byte> output,
                           Patience patience) = 0;
  // Copies `input` of `root` (a rank, member of the group) into `output` of every member; only the
  // root's input is read. Both have the same length on every rank.
  virtual Status broadcast(const Group& group, int root, std::span<const std::byte> input,
                           std::span<std::byte> output, Patience patience) = 0;
  // Reduces the piece's input as allreduce does, bit for bit, and gives each member its block of
  // the result: counts[i] elements, possibly 0, go to group.ranks[i], blocks in that order. The
  // input has piece.count elements, the sum of `counts`; the output has this member's count and
  // does not overlap the input.
  virtual Status reducescatter(const Group& group, DataType dtype, ReduceOp op, const Piece& piece,
                               std::span<const std::uint64_t> counts, Patience patience) = 0;
  // Sends the i-th part of `input` (send_bytes[i] long, parts in order) to group.ranks[i], and
  // places the part from group.ranks[i] (receive_bytes[i] long) as i-th part of `output`. Members
  // agree pairwise: what one sends is what the other receives. The two do not overlap.
  virtual Status alltoall(const Group& group, std::span<const std::byte> input,
                          std::span<const std::size_t> send_bytes, std::span<std::byte> output,
                          std::span<const std::size_t> receive_bytes, Patience patience) = 0;
  // Returns when every member has called it.
  virtual Status barrier(const Group& group, Patience patience) = 0;
  // The collectives from here on use these settings, on every rank alike.
  virtual void tune(const Tunables& /*tunables*/) {}
  // No collective of this group follows.
  virtual void forget(const Group& /*group*/) {}
};

}  // namespace hvdlite
