// The data plane on CPUs: shared memory between the ranks of a host, channels between hosts.
//
// All-reduce, in two levels. Words: the *drivers* of a host are its first L locals, L being the
// smallest number of locals on any host of the group; a chunk is cut into L slices; driver l of
// every host owns slice l. Per chunk, a rank (1) publishes its input in its slot, (2) if it is a
// driver, sums its slice over the locals in ascending rank order, (3) exchanges it with the drivers
// of the same slice on the other hosts: part h of the slice goes to host h, which sums the parts in
// ascending host order and sends the sum back to all, (4) finishes the sum, takes it, and leaves it
// in its slot, and (5) everybody copies the other drivers' slices out. While others work on chunk
// k, a rank already publishes chunk k + 1. A small batch within one host takes one synchronisation:
// everybody publishes everything and sums everything for itself, with the same order and so the
// same bits.
//
// Between hosts an allgather is a sequence of broadcasts, one per member.
// Thread: the engine's runner. Allocates only while its buffers still grow.
#pragma once

#include <map>
#include <vector>

#include "backend/backend.h"
#include "backend/exchange.h"
#include "backend/staging.h"
#include "base/config.h"
#include "collective/piece_list.h"
#include "collective/reduce.h"
#include "transport/fabric.h"

namespace hvdlite {

class HostBackend : public Backend {
 public:
  HostBackend(Fabric& fabric, const Config& config);  // the fabric is borrowed, the config copied

  std::string_view name() const override { return "host"; }
  Viability viable() const override { return {}; }
  void trace_to(Trace& trace) override {
    trace_ = &trace;
    staging_.trace_to(trace_, kTraceRow);
  }
  Status allreduce(const Group& group, DataType dtype, ReduceOp op, std::span<const Piece> pieces,
                   Patience patience) override;
  Status allgather(const Group& group, std::span<const std::byte> input,
                   std::span<const std::size_t> bytes, std::span<std::byte> output,
                   Patience patience) override;
  Status broadcast(const Group& group, int root, std::span<const std::byte> input,
                   std::span<std::byte> output, Patience patience) override;
  Status barrier(const Group& group, Patience patience) override;

 private:
  using Step = Staging::Step;

  // How a group lies on the hosts; made at the group's first collective.
  struct Layout {
    Staging::Locals locals;
    std::vector<std::vector<int>> hosts;  // members by host, hosts in order of their lowest rank
    int host = 0;                         // this rank's, in `hosts`
    int drivers = 1;
    std::vector<int> peers;  // a driver's counterparts by host, this rank included
    bool driver() const { return locals.index < drivers; }
    bool spans_hosts() const { return hosts.size() > 1; }
  };
  // One all-reduce under way.
  struct Reduction {
    const Layout& layout;
    DataType dtype;
    ReduceOp op;
    int size;  // of the group
    std::uint64_t element_bytes;
    Patience patience;
  };

  // A driver need not stage the slice that it reduces itself.
  bool reads_own_slice_in_place(const Layout& layout) const {
    return layout.driver() && !layout.spans_hosts() && !pieces_.prescaled();
  }

  const Layout& layout_of(const Group& group);
  std::uint64_t chunk_bytes(const Layout& layout) const;

  Status reduce_small(const Reduction& reduction);
  Status reduce_chunks(const Reduction& reduction);
  Status publish_chunk(const Reduction& reduction, const Step& step, Range chunk);
  Status reduce_slice(const Reduction& reduction, const Step& step, Range chunk);
  Status reduce_across_hosts(const Reduction& reduction, const Step& step, Range chunk,
                             Range slice);
  Status take_results(const Reduction& reduction, const Step& step, Range chunk);
  // Copies this rank's (prescaled) elements of `range` to `to`.
  void copy_in(const Reduction& reduction, Range range, std::byte* to) const;
  void copy_out(const Reduction& reduction, Range range, const std::byte* from) const;
  // Reduces sources_ (each at range.begin; null is this rank's input where it lies), ends the
  // reduction, and stores the result in the outputs and, if not null, at `to`.
  void finish(const Reduction& reduction, Range range, std::byte* to);

  // Completes transfers_.
  Status exchange_between_hosts(Patience patience, const char* operation);
  // A part of the collective for the timeline, to the end of the scope.
  TraceSpan part(const char* name) const { return {trace_, kTraceRow, name}; }

  Status gather_local(const Layout& layout, std::span<const std::byte> input,
                      std::span<const std::size_t> bytes, std::span<std::byte> output,
                      Patience patience);
  Status broadcast_chunk(const Layout& layout, int root, std::span<const std::byte> input,
                         std::span<std::byte> output, Patience patience);

  Fabric& fabric_;
  const Config config_;
  Staging staging_;
  Trace* trace_ = nullptr;            // borrowed
  std::map<int, Layout> layouts_;     // by group id
  PieceList pieces_;                  // of the current all-reduce
  std::vector<const void*> sources_;  // of the current reduction, in order
  std::vector<const void*> shifted_;  // the same, at a piece within the range
  std::vector<Transfer> transfers_;
  std::vector<std::byte> received_;  // parts of other hosts
};

}  // namespace hvdlite
