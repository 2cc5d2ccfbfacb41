// How hosts reduce a slice of an all-reduce of which some pieces travel between hosts as small
// integers (kernels/packed.h). Part h of the slice goes to host h, which sums the packed numbers of
// all hosts, its own among them, in ascending host order, packs the result, and sends it to all.
// All hosts unpack the same bytes, the one that made them too; so results are the same bits
// everywhere. Packing its own part as well costs a host a little accuracy, and makes the result
// depend neither on who sums what nor on how tensors were batched. Pieces that are not packed
// travel along as they are, and get the bits that they would have alone. Thread: the engine's
// runner.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "kernels/chunks.h"
#include "kernels/pieces.h"
#include "plane/layout.h"
#include "plane/plane.h"
#include "plane/reduction.h"

namespace hvdlite {

class PackedExchange {
 public:
  // A slice of a batch, reduced within this host.
  struct Slice {
    const std::vector<Range>& parts;  // Each host has one, in order, cut between blocks.
    std::byte* lies_at;               // where the elements are, and where the results go
  };

  explicit PackedExchange(HostPlane& plane) : plane_(plane) {}  // borrowed
  Status run(const HostLayout& layout, const PieceList& pieces, DataType dtype,
             const HostReduction& reduction, const Slice& slice, Patience patience);

 private:
  // Puts the parts, as they travel, one behind the other, and returns where each one lies.
  std::vector<std::span<std::byte>> pack_parts(const PieceList& pieces, DataType dtype,
                                               const Slice& slice);
  // Reduces the part of this host, of which `sources` are what the hosts gave.
  void sum(const PieceList& pieces, DataType dtype, const HostReduction& reduction, Range part,
           std::span<const std::byte* const> sources, std::byte* to);

  HostPlane& plane_;
  // Memory that is kept between calls.
  std::vector<std::byte> packed_;    // the slice
  std::vector<std::byte> received_;  // this host's part from the others
};

}  // namespace hvdlite
