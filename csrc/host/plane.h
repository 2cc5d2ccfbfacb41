// What the collectives of the host data plane share: how a group lies on the hosts, the staging
// buffers, the exchange with other hosts, the arithmetic. Thread: the engine's runner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "base/config.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "base/status.h"
#include "host/backend.h"
#include "host/staging.h"
#include "kernels/reduce.h"
#include "trace/trace.h"
#include "transport/fabric.h"
#include "transport/topology.h"

namespace hvdlite {

// How the members of a group lie on the hosts.
//
// Words: the *locals* of a group are its members on this host. Let L be the smallest number of
// locals on any host of the group: the *drivers* of a host are its first L locals. Driver l of each
// host works with driver l of the other hosts: they are *peers*.
struct HostLayout {
  Staging::Locals locals;
  std::vector<std::vector<int>> hosts;  // members by host, hosts in order of their lowest rank
  std::size_t host = 0;                 // this rank's host, an index of `hosts`
  int drivers = 1;
  std::vector<int> peers;   // A driver has one of each host, and itself; others have none.
  std::vector<int> counts;  // Each host has so many members.
  std::vector<int> tree;    // The tree over the hosts (kernels/sum_tree.h).

  bool driver() const { return locals.index < drivers; }
  bool spans_hosts() const { return hosts.size() > 1; }
};

// Full-duplex transfers with several ranks at once over channels: everything that can move moves,
// in either direction, so that no order of sends and receives can block for ever.
//
// A collective queues what it sends and receives, and waits for parts of that. Meanwhile all that
// is queued moves. What goes to one rank moves in the order in which it was queued, and so does
// what comes from it: two ranks queue alike what they have in common, however each cuts it into
// spans. The plane of a rank has one exchange, and a collective begins it.
class Exchange {
 public:
  explicit Exchange(const Fabric& fabric)  // borrowed
      : fabric_(fabric), streams_(fabric.data.size()) {}

  // From here on, waits are drawn on this row, and bytes for ranks of other hosts are counted. All
  // are borrowed.
  void trace_to(Trace& trace, const char* row) {
    trace_ = &trace;
    trace_row_ = row;
  }
  void count_in(Counter& to_other_hosts) { to_other_hosts_ = &to_other_hosts; }

  // Begins a collective, and ends the one before: nothing is queued. `operation` is for messages.
  Exchange& begin(Patience patience, const char* operation);
  // Queues bytes, which stay as they are, or are left alone, until they have moved.
  void send(int rank, std::span<const std::byte> bytes);
  void receive(int rank, std::span<std::byte> bytes);
  // Returns a mark behind all that is queued so far.
  std::uint64_t mark() { return ++mark_; }

  // Each returns when what was queued before the mark has arrived, or has also left. Errors name
  // the rank, and are final: kRankFailed, or kTimeout when it made no progress for the patience.
  Status await_received(std::uint64_t mark) { return await(mark, false); }
  Status await_moved(std::uint64_t mark) { return await(mark, true); }
  // Sends what can leave now, and never waits. The next wait returns its error.
  void send_some();
  // Begins, and completes these transfers.
  Status transfer(std::span<const Transfer> transfers, Patience patience, const char* operation);

 private:
  // What is left of what was queued for one direction.
  template <typename Byte>
  struct Queue {
    struct Item {
      std::span<Byte> bytes;
      std::uint64_t mark;  // the next one after it
    };
    std::vector<Item> items;
    std::size_t first = 0;  // before it all has moved

    bool empty() const { return first == items.size(); }
    bool moved(std::uint64_t mark) const { return empty() || items[first].mark > mark; }
    void clear() {
      items.clear();
      first = 0;
    }
  };
  // The transfers with one rank.
  struct Stream {
    Queue<const std::byte> outgoing;
    Queue<std::byte> incoming;
    bool active = false;  // it is in active_
  };
  Stream& stream_of(int rank);
  Status await(std::uint64_t mark, bool sent);
  // Moves what it can of all streams; returns whether they have come to the mark.
  bool come_to(std::uint64_t mark, bool sent);
  Status write_some(Channel& channel, Queue<const std::byte>& queue);
  // Reads what was queued before the mark. What comes later stays in the kernel until it is needed:
  // by then it is in the processor's cache when it is reduced.
  Status read_some(Channel& channel, Queue<std::byte>& queue, std::uint64_t mark);

  const Fabric& fabric_;
  Trace* trace_ = nullptr;
  const char* trace_row_ = "";
  Counter* to_other_hosts_ = nullptr;
  std::vector<Stream> streams_;  // Each rank has one.
  // The rest belongs to this collective.
  std::vector<int> active_;  // ranks with a stream
  Patience patience_{0};
  const char* operation_ = "";
  std::uint64_t mark_ = 0;
  std::uint64_t moved_ = 0;  // bytes
  int waiting_for_ = -1;
  const char* owes_ = "";  // what that rank has not done
  Status broken_;
};

// The parts that all collectives of a rank use: the staging buffers, the channels to other hosts,
// the sizes of chunks, the timeline. HostBackend owns it.
class HostPlane {
 public:
  HostPlane(Fabric& fabric, const Config& config);  // the fabric is borrowed

  int rank() const { return fabric_.topology.rank; }
  // Returns the group's layout, made at the first collective of each of its generations. It is
  // valid until the group's next generation, or forget().
  const HostLayout& layout_of(const Group& group);
  void forget(const Group& group) { layouts_.erase(group.id); }
  Staging& staging() { return staging_; }
  Exchange& exchange() { return exchange_; }
  const Tunables& tunables() const { return tunables_; }
  // The collectives from here on use these settings.
  void tune(const Tunables& tunables) { tunables_ = tunables; }
  // Parts of a collective and waits are drawn on this row from here on. Both are borrowed.
  void trace_to(Trace& trace, const char* row);
  // Bytes for ranks of other hosts, and bytes that are not staged, are counted here from now on.
  // Both are borrowed.
  void count_in(Counter& to_other_hosts, Counter& unstaged) {
    exchange_.count_in(to_other_hosts);
    unstaged_ = &unstaged;
  }
  void count_unstaged(std::uint64_t bytes) {
    if (unstaged_ != nullptr) *unstaged_ += bytes;
  }
  // A part of the collective for the timeline, to the end of the scope.
  TraceSpan part(const char* name) const { return {trace_, trace_row_, name}; }

  // The bytes that one step of the group stages.
  std::uint64_t chunk_bytes(const HostLayout& layout) const;
  // The bytes of a step that each of `parts` equal parts of it gets, cut at cache lines. kInternal,
  // on every rank alike, where the buffers are too small for so many.
  Result<std::uint64_t> share_bytes(const HostLayout& layout, std::size_t parts) const;

  // Runs steps 0 to `steps` - 1, each published (publish(step, k)) before the one before it is
  // taken (take(step, k)): while others work on step k, this rank already publishes k + 1.
  // Functions may lower `steps`, not below those that have begun.
  template <typename Publish, typename Take>
  Status pipeline(const HostLayout& layout, Patience patience, const char* operation,
                  const std::uint64_t& steps, Publish publish, Take take);

 private:
  Fabric& fabric_;
  Tunables tunables_;
  Staging staging_;
  Exchange exchange_;
  std::map<int, HostLayout> layouts_;  // The key is a group id.
  Trace* trace_ = nullptr;
  const char* trace_row_ = "";
  Counter* unstaged_ = nullptr;
};

template <typename Publish, typename Take>
Status HostPlane::pipeline(const HostLayout& layout, Patience patience, const char* operation,
                           const std::uint64_t& steps, Publish publish, Take take) {
  const auto begin = [&] { return staging_.begin(layout.locals, patience, operation); };
  Staging::Step step = begin();
  HVDLITE_RETURN_IF_ERROR(publish(step, 0));
  for (std::uint64_t k = 0; k < steps; ++k) {
    Staging::Step next;
    if (k + 1 < steps) {
      next = begin();
      HVDLITE_RETURN_IF_ERROR(publish(next, k + 1));
    }
    HVDLITE_RETURN_IF_ERROR(take(step, k));
    step = next;
  }
  return Status();
}

// Addresses of what is reduced into one, in ascending order of the members that it comes from.
using Sources = std::span<const void* const>;

// The arithmetic of one reduction over the members of each host and then over hosts, the same for
// an all-reduce and a reduce-scatter: so their results are the same bits. A value; any thread.
class HostReduction {
 public:
  // `travels` is the element type of what members and hosts give to each other. The layout is
  // borrowed.
  HostReduction(const HostLayout& layout, const Group& group, DataType travels, ReduceOp op)
      : layout_(layout),
        dtype_(travels),
        op_(op),
        divisor_(op == ReduceOp::kAverage ? group.divisor() : 1) {}

  // Reduces what the members of this host give to what this host gives to the others.
  void within_host(Sources members, void* to, std::size_t count) const {
    const ReduceOp op = op_ == ReduceOp::kAverage ? ReduceOp::kSum : op_;
    reduce(dtype_, op, members, to, count, {exchanges_means() ? layout_.counts[layout_.host] : 1});
  }
  // Ends the reduction: `parts` are what the hosts gave or, of a group on one host, its members.
  void finish(Sources parts, void* to, std::size_t count, double factor) const {
    reduce(dtype_, op_, parts, to, count,
           {divisor_, factor, exchanges_means() ? layout_.counts.data() : nullptr,
            layout_.spans_hosts() ? layout_.tree.data() : nullptr});
  }

 private:
  // A 16-bit float may not hold the sum of a host, but it holds the mean: so the hosts give each
  // other means, and each of them counts as often as its host has members. Wider types: sums.
  bool exchanges_means() const {
    return op_ == ReduceOp::kAverage && layout_.spans_hosts() && is_floating(dtype_) &&
           size_of(dtype_) == sizeof(std::uint16_t);
  }

  const HostLayout& layout_;
  const DataType dtype_;
  const ReduceOp op_;
  const int divisor_;  // 1 unless it averages
};

}  // namespace hvdlite
