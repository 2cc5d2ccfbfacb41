// The all-reduce of the host data plane, in two levels: within each host, then between hosts.
//
// A batch is cut into chunks, and a chunk into as many slices as a host has drivers (layout.h):
// driver l of every host owns slice l. Per chunk, a rank
//   (1) publishes its input in its staging buffer (and saves it, where a piece asks for a copy:
//       then the input is read from memory once);
//   (2) if it is a driver, reduces its slice over the locals, by the tree of sum_tree.h;
//   (3) exchanges the slice with its peers, in pieces that overlap (inter_host_exchange.h);
//   (4) finishes the result, takes it, and leaves it in its staging buffer;
//   (5) copies the other drivers' slices out of their buffers.
// While others work on chunk k, a rank already publishes chunk k + 1, and a driver begins to
// exchange its slice of it. Where every host has one member only, nothing is staged: pieces of the
// batch cross between hosts from tensor to tensor, or through small buffers. A small batch within
// one host takes one synchronisation: each member publishes everything and reduces everything for
// itself, by the same tree and so to the same bits. From the third chunk on, tensors in gradient
// memory are not staged (shared_gradients.h). Thread: the engine's runner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/allreduce_batch.h"
#include "host/backend.h"
#include "host/inter_host_exchange.h"
#include "host/plane.h"
#include "host/shared_gradients.h"
#include "kernels/pieces.h"

namespace hvdlite {

class HostAllreduce {
 public:
  explicit HostAllreduce(HostPlane& plane) : plane_(plane), gradients_(plane) {}  // borrowed
  // `layout` is that of call.group. Any op but kAdasum.
  Status run(const HostLayout& layout, const Allreduce& call, Patience patience);

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
