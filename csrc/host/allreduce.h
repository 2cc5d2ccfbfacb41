// The all-reduce of the host data plane, in two levels: within each host, then between hosts.
//
// A batch is cut into chunks, and a chunk into as many slices as a host has drivers (plane.h):
// driver l of every host owns slice l. Per chunk, a rank
//   (1) publishes its input in its staging buffer (and saves it, where a piece asks for a copy:
//       then the input is read from memory once);
//   (2) if it is a driver, reduces its slice over the locals, by the tree of sum_tree.h;
//   (3) exchanges the slice with its peers, in pieces that overlap (InterHostExchange);
//   (4) finishes the result, takes it, and leaves it in its staging buffer;
//   (5) copies the other drivers' slices out of their buffers.
// While others work on chunk k, a rank already publishes chunk k + 1, and a driver begins to
// exchange its slice of it. Where every host has one member only, nothing is staged: pieces of the
// batch cross between hosts from tensor to tensor, or through small buffers. A small batch within
// one host takes one synchronisation: each member publishes everything and reduces everything for
// itself, by the same tree and so to the same bits. From the third chunk on, tensors in gradient
// memory are not staged (SharedGradients). Thread: the engine's runner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/backend.h"
#include "host/plane.h"
#include "kernels/pieces.h"

namespace hvdlite {

// One all-reduce under way on the host data plane: its cuts, and the arithmetic and copies between
// tensors and buffers. HostAllreduce makes it, and lends it what its fields refer to.
struct AllreduceBatch {
  const HostPlane& plane;
  const HostLayout& layout;
  const PieceList& pieces;
  ElementTypes types;
  HostReduction reduction;
  Patience patience;
  std::uint64_t element_bytes;  // An element that travels has so many.
  bool own_slice_in_place;      // a driver reads the input of its own slice where it lies
  bool saves;                   // some piece asks for a copy of its input

  Range part(Range whole, std::uint64_t parts, std::uint64_t index) const {
    return part_of(whole, element_bytes, parts, index);
  }

  // Makes the copies that the pieces ask for. Ranges come in ascending order, each before anything
  // in it is overwritten.
  void save_inputs(Range range) const;
  // Copies this rank's elements of `range`, prescaled and cast, to `to`.
  void copy_in(Range range, std::byte* to) const;
  // Copies results to the outputs, where elements are cast back.
  void copy_out(Range range, const std::byte* from) const;
  // Ends the reduction of `range` from `sources`, each at range.begin, where null is this rank's
  // input as it lies in memory. The result goes to `to`, which is null only where nothing is cast,
  // and to the outputs; of a group on many hosts a result that is cast goes to `to` alone.
  void finish(Range range, Sources sources, std::byte* to) const;

  // Where this rank's tensors are both input and output, and those of the members lie alike: so
  // many bytes from each of this rank's elements to the same element of each member.
  using Distances = std::span<const std::ptrdiff_t>;
  // Ends the reduction of `range` where the elements lie.
  void finish_in_place(Range range, Distances members) const;
  // Copies another member's elements to this rank's.
  void copy_from(Range range, std::ptrdiff_t member) const;

 private:
  void finish_cast(Range range, Sources sources, std::byte* to) const;
};

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
// each likes: what travels is the same.
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

  // The caller has begun the exchange. Both are borrowed.
  InterHostExchange(Exchange& exchange, const AllreduceBatch& batch)
      : exchange_(exchange), batch_(batch) {}

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

  Exchange& exchange_;
  const AllreduceBatch& batch_;
};

// An all-reduce within one host of tensors that lie in gradient memory (transport/segment.h),
// without staging: each rank reads the others' tensors where they lie.
//
// The batch is cut into chunks and slices as above. Driver l reduces slice l of all ranks
// into its own memory, by the tree of sum_tree.h; the others then copy that slice into theirs. A
// rank writes to its own memory alone, so one that was given up for dead and goes on later can
// spoil nothing. A slice is overwritten only after its driver has read it; and a rank returns only
// when nobody reads its memory any more.
//
// Ranks show each other where their tensors lie when they publish the first chunk of a batch. They
// reduce in place where the tensors of all lie alike, which all see alike.
class SharedGradients {
 public:
  explicit SharedGradients(HostPlane& plane) : plane_(plane) {}  // borrowed

  // Shows where this rank's tensors of the batch lie; comes before the step is published.
  void show(const AllreduceBatch& batch, const Staging::Step& step);
  // Whether reduce() can run, when all locals have published the step.
  bool found(const AllreduceBatch& batch, const Staging::Step& step);
  // Reduces these elements. found() of the batch was true.
  Status reduce(const AllreduceBatch& batch, Range elements);

 private:
  Staging::Place place_of(const AllreduceBatch& batch) const;

  HostPlane& plane_;
  std::vector<std::ptrdiff_t> members_;  // see AllreduceBatch::Distances; of the last found()
};

class HostAllreduce {
 public:
  explicit HostAllreduce(HostPlane& plane) : plane_(plane), gradients_(plane) {}  // borrowed
  // Any op but kAdasum.
  Status run(const Allreduce& call, Patience patience);

 private:
  using Batch = AllreduceBatch;
  // What one step of a batch stages.
  struct Chunk {
    const Batch& batch;
    const Staging::Step& step;
    Range elements;
    Range slice(int driver) const { return batch.part(elements, batch.layout.drivers, driver); }
    // Where the elements lie in a buffer.
    std::uint64_t offset(Range range) const {
      return (range.begin - elements.begin) * batch.element_bytes;
    }
  };

  Status reduce_small(const Batch& batch);
  Status reduce_chunks(const Batch& batch);           // within a host
  Status reduce_crossing_chunks(const Batch& batch);  // between hosts
  Status reduce_crossing_pieces(const Batch& batch);  // the same, with one member per host

  // (1) Publishes this rank's input of the chunk, and `shows` where the batch's tensors lie.
  Status publish(const Chunk& chunk, bool shows = false);
  // As a driver: (2) to (4) of a chunk that does not cross.
  Status reduce_slice(const Chunk& chunk);
  // As a driver: (2) and the scatter of (3), piece by piece, into these slots (`alone`: the batch
  // has no other chunk); then the rest of (3) and (4).
  Status scatter_slice(const Chunk& chunk, bool alone, InterHostExchange& inter_host,
                       std::vector<InterHostExchange::Slot>& slots);
  Status gather_slice(const Chunk& chunk, InterHostExchange& inter_host,
                      std::vector<InterHostExchange::Slot>& slots);
  // (5) Takes the results of the other drivers, and ends the step.
  Status take_results(const Chunk& chunk);
  // Bytes of a piece that crosses, of a run that is so long.
  std::uint64_t piece_bytes(std::uint64_t bytes, std::size_t hosts) const;

  HostPlane& plane_;
  SharedGradients gradients_;
  // Memory that is kept between batches. What is in it belongs to the one function that fills it,
  // and to what that calls.
  PieceList pieces_;
  std::vector<InterHostExchange::Slot> slots_[2];  // pieces on their way, of two chunks
  std::vector<std::byte> narrow_;                  // a small result before it is cast back
};

}  // namespace hvdlite
