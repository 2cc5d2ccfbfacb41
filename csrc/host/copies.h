// The collectives of the host data plane that only copy. Thread: the engine's runner.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "host/backend.h"
#include "host/plane.h"
#include "kernels/pieces.h"

namespace hvdlite {

// Copies bytes that need not move where they already lie.
inline void copy_bytes(std::span<const std::byte> from, std::byte* to) {
  if (!from.empty() && from.data() != to) std::memmove(to, from.data(), from.size());
}

// Spans of memory that count as one run of bytes, from 0 on: the blocks of several tensors that
// travel together. A value; the memory is borrowed. Any thread.
template <typename Byte>
class SpanList {
 public:
  void add(std::span<Byte> span) {
    if (span.empty()) return;
    begins_.push_back(bytes_);
    spans_.push_back(span);
    bytes_ += span.size();
  }
  std::size_t bytes() const { return bytes_; }

  // Calls visit(span) for what lies within `range`, in order. The range may end behind the run.
  template <typename Visit>
  void for_each(Range range, Visit&& visit) const {
    if (range.begin >= std::min<std::uint64_t>(range.end, bytes_)) return;
    const auto after = std::upper_bound(begins_.begin(), begins_.end(), range.begin);
    for (auto i = static_cast<std::size_t>(after - begins_.begin()) - 1;
         i < spans_.size() && begins_[i] < range.end; ++i) {
      const std::size_t begin = std::max<std::size_t>(begins_[i], range.begin) - begins_[i];
      const std::size_t end = std::min<std::size_t>(begins_[i] + spans_[i].size(), range.end);
      visit(spans_[i].subspan(begin, end - begins_[i] - begin));
    }
  }
  // The part of the run that lies within `range`.
  SpanList part(Range range) const {
    SpanList result;
    for_each(range, [&](std::span<Byte> span) { result.add(span); });
    return result;
  }
  void add(const SpanList& other) {
    for (const std::span<Byte> span : other.spans_) add(span);
  }

 private:
  std::vector<std::span<Byte>> spans_;
  std::vector<std::size_t> begins_;
  std::size_t bytes_ = 0;
};

// The root sends each chunk to one member of every other host; these members publish it there.
Status host_broadcast(HostPlane& plane, const Broadcast& call, Patience patience);
// Through the staging buffers within a host; between hosts in steps, in each of which every rank
// sends to one other and receives from one.
Status host_alltoall(HostPlane& plane, const Alltoall& call, Patience patience);
// The locals meet, then the first ones of the hosts, then the locals again.
Status host_barrier(HostPlane& plane, const Group& group, Patience patience);

// The allgather of the host data plane, of one or more tensors that travel together.
//
// Words: the *run* of a host is what its members give, one behind the other. (1) Within a host, the
// members give each other their blocks. (2) Each driver takes one slice of every host's run around
// a ring of hosts: it sends that of its own host to the next host, and passes on what comes from
// the host before, piece by piece, while the next piece is on its way. Little data goes from each
// host to all others at once instead. (3) Within a host, the drivers hand on what they have
// received. Bytes cross each link once, from output to output.
class HostAllgather {
 public:
  // `plane` is borrowed.
  HostAllgather(HostPlane& plane, const Group& group, Patience patience)
      : plane_(plane), layout_(plane.layout_of(group)), patience_(patience) {}
  Status run(std::span<const Allgather> calls);

 private:
  using Outputs = SpanList<std::byte>;
  using Inputs = SpanList<const std::byte>;

  // Each local publishes a run, and copies those of the others: that of local i to theirs[i].
  Status spread_within_host(const Inputs& own, const std::vector<Outputs>& theirs);
  Status cross();
  Status cross_directly();
  Status cross_in_ring();
  Status hand_on();
  // A driver's slice of the run of a host.
  Outputs slice(std::size_t host, int driver) const {
    const Outputs& run = runs_[host];
    return run.part(part_of({0, run.bytes()}, 1, layout_.drivers, driver));
  }

  HostPlane& plane_;
  const HostLayout& layout_;
  const Patience patience_;
  std::vector<Outputs> runs_;  // Each host has one, where its part lies in the outputs.
};

}  // namespace hvdlite
