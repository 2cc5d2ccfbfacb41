// The data plane on CPUs: shared memory between the ranks of a host, channels between hosts.
//
// All-reduce, in two levels. Words: the *drivers* of a host are its first L locals, L being the
// smallest number of locals on any host of the group; a chunk is cut into L slices; driver l of
// every host owns slice l. Per chunk, a rank (1) publishes its input in its slot, (2) if it is a
// driver, sums its slice over the locals in ascending rank order, (3) exchanges it with the drivers
// of the same slice on the other hosts: part h of the slice goes to host h, which sums the parts in
// ascending host order (of an average of 16-bit floats a host gives its mean, which counts as often
// as it has ranks) and sends the sum back to all, (4) finishes the sum, takes it, and leaves it
// in its slot, and (5) everybody copies the other drivers' slices out. While others work on chunk
// k, a rank already publishes chunk k + 1. A small batch within one host takes one synchronisation:
// everybody publishes everything and sums everything for itself, with the same order and so the
// same bits.
//
// Reduce-scatter, per step: (1) every local publishes the next part of every member's block, (2)
// each sums its own part over the locals, and the parts of those members of other hosts that it
// *serves*, (3) sends them those, gets the sums of the other hosts for its own part, and ends its
// sum in ascending host order. So the order of accumulation is the all-reduce's.
//
// An alltoall goes through the slots within a host, and in one exchange of everybody with everybody
// between hosts. Between hosts an allgather is a sequence of broadcasts, one per member.
//
// Thread: the engine's runner. An all-reduce allocates only while its buffers still grow.
#pragma once

#include <map>
#include <vector>

#include "backend/adasum_reduction.h"
#include "backend/backend.h"
#include "base/config.h"
#include "host/exchange.h"
#include "host/staging.h"
#include "kernels/pieces.h"
#include "kernels/reduce.h"
#include "transport/fabric.h"

namespace hvdlite {

class HostBackend : public Backend {
 public:
  HostBackend(Fabric& fabric, const Config& config);  // the fabric is borrowed

  std::string_view name() const override { return "host"; }
  void trace_to(Trace& trace) override {
    trace_ = &trace;
    staging_.trace_to(trace_, kTraceRow);
  }
  Status allreduce(const Allreduce& call, Patience patience) override;
  Status allgather(const Allgather& call, Patience patience) override;
  Status broadcast(const Broadcast& call, Patience patience) override;
  Status alltoall(const Alltoall& call, Patience patience) override;
  Status reducescatter(const Reducescatter& call, Patience patience) override;
  Status barrier(const Group& group, Patience patience) override;
  void tune(const Tunables& tunables) override { tunables_ = tunables; }
  void forget(const Group& group) override { layouts_.erase(group.id); }

 private:
  using Step = Staging::Step;

  // How a group lies on the hosts; made at the first collective of each of its generations.
  struct Layout {
    Staging::Locals locals;
    std::vector<std::vector<int>> hosts;  // members by host, hosts in order of their lowest rank
    int host = 0;                         // this rank's, in `hosts`
    int drivers = 1;
    std::vector<int> peers;   // a driver's counterparts by host, this rank included
    std::vector<int> counts;  // of members, by host
    bool driver() const { return locals.index < drivers; }
    bool spans_hosts() const { return hosts.size() > 1; }
  };
  // One all-reduce under way.
  struct Reduction {
    const Layout& layout;
    ElementTypes types;
    ReduceOp op;
    int divisor;                  // 1 unless it averages
    std::uint64_t element_bytes;  // of what travels
    Patience patience;
    // A 16-bit float may not hold the sum of a host, but it holds the mean: so the hosts give each
    // other means, and each of them counts as often as its host has members. Wider types: sums.
    bool exchanges_means() const {
      return op == ReduceOp::kAverage && layout.spans_hosts() && is_floating(types.wire) &&
             element_bytes == sizeof(std::uint16_t);
    }
    // What this host gives to the others of an average is a sum or a mean.
    ReduceOp op_within_host() const { return op == ReduceOp::kAverage ? ReduceOp::kSum : op; }
    Finish end_within_host() const {
      return {exchanges_means() ? layout.counts[static_cast<std::size_t>(layout.host)] : 1};
    }
    // The end of all: over the ranks of the only host, or over what the hosts gave.
    Finish end(double factor) const {
      return {divisor, factor, exchanges_means() ? layout.counts.data() : nullptr};
    }
  };

  // One reduce-scatter under way.
  struct Scatter {
    struct Served {
      std::size_t member = 0;  // position in the group
      int rank = -1;
      bool own_host = false;  // only this rank itself
    };
    const Reduction& reduction;
    const Piece& piece;
    std::span<const std::uint64_t> counts;
    std::uint64_t share = 1;            // elements of every block that one step stages
    std::vector<std::uint64_t> begins;  // of the blocks in the input
    std::vector<Served> served;         // whose parts this rank sums: its own first

    Range part(std::size_t member, std::uint64_t step) const {
      return chunk_at(counts[member], share, step);
    }
    std::uint64_t slot_offset(std::size_t member) const {
      return member * share * reduction.element_bytes;
    }
  };

  // A driver need not stage the slice that it reduces itself.
  bool reads_own_slice_in_place(const Reduction& reduction) const {
    const Layout& layout = reduction.layout;
    return layout.driver() && !layout.spans_hosts() && !pieces_.prescaled() &&
           !reduction.types.cast();
  }

  const Layout& layout_of(const Group& group);
  std::uint64_t chunk_bytes(const Layout& layout) const;
  // Bytes of a step that each of `parts` equal parts of it gets, cut at cache lines. kInternal, on
  // every rank alike, where the slots are too small for so many.
  Result<std::uint64_t> share_bytes(const Layout& layout, std::size_t parts) const;
  // Steps 0 to `steps`, each published (publish(step, k)) before the one before it is taken
  // (take(step, k)): while others work on step k, this rank already publishes k + 1.
  template <typename Publish, typename Take>
  Status pipeline(const Layout& layout, Patience patience, const char* operation,
                  std::uint64_t steps, Publish publish, Take take);

  Status reduce_small(const Reduction& reduction);
  Status reduce_chunks(const Reduction& reduction);
  Status publish_chunk(const Reduction& reduction, const Step& step, Range chunk);
  Status reduce_slice(const Reduction& reduction, const Step& step, Range chunk);
  Status reduce_across_hosts(const Reduction& reduction, const Step& step, Range chunk,
                             Range slice);
  Status take_results(const Reduction& reduction, const Step& step, Range chunk);
  // Copies this rank's elements of `range`, prescaled and cast, to `to`; and results to the
  // outputs, where they are cast, too.
  void copy_in(const Reduction& reduction, Range range, std::byte* to) const;
  void copy_out(const Reduction& reduction, Range range, const std::byte* from) const;
  // Reduces sources_ (each at range.begin; null is this rank's input where it lies), ends the
  // reduction, and stores the result in the outputs and, if not null, at `to`.
  void finish(const Reduction& reduction, Range range, std::byte* to);
  void finish_cast(const Reduction& reduction, Range range, std::byte* to);

  // Completes transfers_.
  Status exchange_between_hosts(Patience patience, const char* operation);
  // A part of the collective for the timeline, to the end of the scope.
  TraceSpan part(const char* name) const { return {trace_, kTraceRow, name}; }

  Scatter make_scatter(const Reduction& reduction, const Group& group, const Piece& piece,
                       std::span<const std::uint64_t> counts, std::uint64_t share) const;
  Status publish_parts(const Scatter& scatter, const Step& step, std::uint64_t k);
  Status reduce_parts(const Scatter& scatter, const Step& step, std::uint64_t k);
  Status end_part(const Scatter& scatter, std::uint64_t k);
  void add_incoming(int rank, std::span<std::byte> bytes);

  template <typename Byte>
  struct Parts;  // what an alltoall sends, or receives
  using Outgoing = Parts<const std::byte>;
  using Incoming = Parts<std::byte>;
  Status swap_local(const Layout& layout, const Outgoing& outgoing, const Incoming& incoming,
                    Patience patience);
  Status swap_remote(const Layout& layout, const Outgoing& outgoing, const Incoming& incoming,
                     Patience patience);
  Status gather_local(const Layout& layout, std::span<const std::byte> input,
                      std::span<const std::size_t> bytes, std::span<std::byte> output,
                      Patience patience);
  Status broadcast_chunk(const Layout& layout, int root, std::span<const std::byte> input,
                         std::span<std::byte> output, Patience patience);

  Fabric& fabric_;
  Tunables tunables_;
  Staging staging_;
  Trace* trace_ = nullptr;         // borrowed
  std::map<int, Layout> layouts_;  // by group id
  AdasumReduction adasum_;
  PieceList pieces_;                  // of the current all-reduce
  std::vector<const void*> sources_;  // of the current reduction, in order
  std::vector<const void*> shifted_;  // the same, at a piece within the range
  std::vector<Transfer> transfers_;
  std::vector<std::byte> received_;  // parts of other hosts
  std::vector<std::byte> narrow_;    // a small result before it is cast back
  std::vector<std::byte> partials_;  // a reduce-scatter's sums over this host, by member served
};

template <typename Publish, typename Take>
Status HostBackend::pipeline(const Layout& layout, Patience patience, const char* operation,
                             std::uint64_t steps, Publish publish, Take take) {
  const auto begin = [&] { return staging_.begin(layout.locals, patience, operation); };
  Step step = begin();
  HVDLITE_RETURN_IF_ERROR(publish(step, 0));
  for (std::uint64_t k = 0; k < steps; ++k) {
    Step next;
    if (k + 1 < steps) {
      next = begin();
      HVDLITE_RETURN_IF_ERROR(publish(next, k + 1));
    }
    HVDLITE_RETURN_IF_ERROR(take(step, k));
    step = next;
  }
  return Status();
}

}  // namespace hvdlite
