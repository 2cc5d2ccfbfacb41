// How pieces of an all-reduce cross between hosts. Part h of a piece goes to host h, which reduces
// the parts by the tree over the hosts and sends the result back to all: the *scatter* and the
// *gather* of a piece. (Of an average of 16-bit floats a host gives its mean, which counts as often
// as it has members.)
//
// A little piece without others goes to all hosts as a whole, and each of them reduces all of it,
// by the same tree and so to the same bits: that takes one way through the network instead of two.
//
// Pieces overlap: the caller scatters some pieces ahead, so that the network carries their parts
// while this rank waits for an earlier piece and reduces it. All peers make the same calls in the
// same order. A piece lies either in a buffer or, where nothing has to be packed, in the tensors
// themselves, from which it is sent and into which its results are received. Ranks choose that as
// each likes: what travels is the same. Thread: the engine's runner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/allreduce_batch.h"
#include "host/plane.h"
#include "kernels/pieces.h"

namespace hvdlite {

class InterHostExchange {
 public:
  // A piece on its way. Its memory is kept, for the next piece in its place.
  struct Slot {
    Range range;
    std::byte* lies_at = nullptr;  // where the elements are, and the results go; null: the tensors
    std::vector<Range> parts;      // Each host has one.
    bool little = false;           // every host reduces the whole
    std::vector<std::byte> received;  // this host's part from the others
    std::vector<std::byte> buffer;    // for the caller's use
    std::uint64_t scattered = 0;      // marks of the exchange
    std::uint64_t gathered = 0;
  };

  // The caller has begun an exchange of the plane. All are borrowed.
  InterHostExchange(HostPlane& plane, Exchange& exchange, const AllreduceBatch& batch)
      : plane_(plane), exchange_(exchange), batch_(batch) {}

  // Whether elements can travel as they lie in the tensors: they are neither scaled nor cast on
  // the way in, and long runs of them lie together.
  static bool travels_from_tensors(const AllreduceBatch& batch, Range range);

  // Queues the scatter of a piece, of which the slot has the range and lies_at. `alone`: it is all
  // that crosses.
  void scatter(Slot& slot, bool alone);
  // Waits for the others' parts, reduces this host's part, and queues the gather.
  Status reduce(Slot& slot);
  // Waits until the piece has moved, and copies the results to the outputs that do not have them.
  Status take(Slot& slot);

 private:
  // Calls visit(input, output, bytes) for the memory of a part, in order.
  template <typename Visit>
  void for_each_span(const Slot& slot, Range part, Visit visit) const;

  HostPlane& plane_;
  Exchange& exchange_;
  const AllreduceBatch& batch_;
};

}  // namespace hvdlite
