// The reduce-scatter of the host data plane.
//
// Every member's block of the result is staged in shares, one share of every block per step. Per
// step, a rank
//   (1) publishes its input for the step's share of every block;
//   (2) on one host, reduces its own share over the locals and ends there; between hosts, reduces
//       over the locals its own share and those of the members of other hosts that it *serves*,
//       which the locals divide among them;
//   (3) sends the served members the sums of this host, receives the other hosts' sums of its own
//       share, and ends its reduction by the tree over the hosts.
// So the tree is the all-reduce's. Thread: the engine's runner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/backend.h"
#include "host/plane.h"
#include "kernels/pieces.h"

namespace hvdlite {

class HostReducescatter {
 public:
  explicit HostReducescatter(HostPlane& plane) : plane_(plane) {}  // borrowed
  Status run(const Reducescatter& call, Patience patience);

 private:
  struct Served {
    std::size_t member = 0;  // position in the group
    int rank = -1;
  };
  // One reduce-scatter under way.
  struct Scatter {
    const HostLayout& layout;
    const Reducescatter& call;
    HostReduction reduction;
    Patience patience;
    std::size_t self = 0;               // position of this rank in the group
    std::uint64_t share = 1;            // elements of every block that one step stages
    std::vector<std::uint64_t> begins;  // The blocks begin here in the input.
    std::vector<Served> served;         // the members of other hosts that this rank serves
    // Between hosts, both in shares: the sums over this host, of this rank's own part, then of
    // those that it serves; what the hosts give to the own part, by host.
    std::byte* sums = nullptr;
    std::byte* received = nullptr;

    std::uint64_t element_bytes() const { return size_of(call.dtype); }
    // What step k stages of a member's block: a range of its elements, possibly empty.
    Range part(std::size_t member, std::uint64_t k) const {
      return chunk_at(call.counts[member], share, k);
    }
    std::size_t share_bytes() const { return share * element_bytes(); }
    std::size_t buffer_offset(std::size_t member) const { return member * share_bytes(); }
    // Where the result of this rank's part goes.
    std::byte* output(Range own) const {
      return static_cast<std::byte*>(call.piece.output) + own.begin * element_bytes();
    }
  };
  Scatter set_up(const HostLayout& layout, const Reducescatter& call, Patience patience,
                 std::uint64_t share);

  // (1) Publishes this rank's input for the parts of step k.
  Status publish(const Scatter& scatter, const Staging::Step& step, std::uint64_t k);
  // (2) on one host. Ends the step.
  Status reduce_own_part(const Scatter& scatter, const Staging::Step& step, std::uint64_t k);
  // (2) between hosts. Ends the step, and returns what is to be sent to the members served.
  Result<std::vector<Transfer>> sum_within_host(const Scatter& scatter, const Staging::Step& step,
                                                std::uint64_t k);
  // (3) Completes these transfers and those of the own part, and ends its reduction.
  Status reduce_across_hosts(const Scatter& scatter, std::uint64_t k,
                             std::vector<Transfer> transfers);

  HostPlane& plane_;
  std::vector<std::byte> buffer_;  // It holds one run's sums and received, and keeps its room.
};

}  // namespace hvdlite
