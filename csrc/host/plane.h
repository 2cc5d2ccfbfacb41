// What the collectives of the host data plane share: the staging buffers, the channels to other
// hosts, the sizes of chunks, the timeline. HostBackend owns it. Thread: the engine's runner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/config.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "base/status.h"
#include "host/backend.h"
#include "host/exchange.h"
#include "host/layout.h"
#include "host/staging.h"
#include "trace/trace.h"
#include "transport/fabric.h"

namespace hvdlite {

class HostPlane {
 public:
  HostPlane(Fabric& fabric, const Config& config);  // the fabric is borrowed

  int rank() const { return fabric_.topology.rank; }
  const Topology& topology() const { return fabric_.topology; }
  Staging& staging() { return staging_; }
  const Tunables& tunables() const { return tunables_; }
  // The collectives from here on use these settings.
  void tune(const Tunables& tunables) { tunables_ = tunables; }
  // Parts of a collective and waits are drawn on this row from here on. Both are borrowed.
  void trace_to(Trace& trace, const char* row);
  // Bytes for ranks of other hosts, and bytes that are not staged, are counted here from now on.
  // Both are borrowed.
  void count_in(Counter& to_other_hosts, Counter& unstaged) {
    to_other_hosts_ = &to_other_hosts;
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
  // Begins an exchange with other ranks, and ends the one before it; the plane owns it.
  Exchange& begin_exchange(Patience patience, const char* operation) {
    exchange_.begin(patience, operation);
    return exchange_;
  }
  // Queues bytes for another rank, and counts them.
  void send(int rank, std::span<const std::byte> bytes);
  // Waits for what was queued before the mark, as the functions of Exchange do.
  Status await_received(std::uint64_t mark);
  Status await_moved(std::uint64_t mark);
  // Begins an exchange, and completes these transfers.
  Status exchange_with_ranks(std::span<const Transfer> transfers, Patience patience,
                             const char* operation);

 private:
  Fabric& fabric_;
  Tunables tunables_;
  Staging staging_;
  Exchange exchange_;
  Trace* trace_ = nullptr;
  const char* trace_row_ = "";
  Counter* to_other_hosts_ = nullptr;
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

}  // namespace hvdlite
