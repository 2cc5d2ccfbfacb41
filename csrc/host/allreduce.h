// The all-reduce of the host data plane, in two levels: within each host, then between hosts.
//
// A batch is cut into chunks, and a chunk into as many slices as a host has drivers (layout.h):
// driver l of every host owns slice l. Per chunk, a rank
//   (1) publishes its input in its staging buffer (and saves it, where a piece asks for a copy:
//       then the input is read from memory once);
//   (2) if it is a driver, reduces its slice over the locals, in ascending rank order;
//   (3) exchanges the slice with its peers: part h of the slice goes to host h, which reduces the
//       parts in ascending host order and sends the result back to all (of an average of 16-bit
//       floats a host gives its mean, which counts as often as it has members). A batch
//       of which something is packed takes packed_exchange.h instead;
//   (4) finishes the result, takes it, and leaves it in its staging buffer;
//   (5) copies the other drivers' slices out of their buffers.
// While others work on chunk k, a rank already publishes chunk k + 1. A small batch within one host
// takes one synchronisation: each member publishes everything and reduces everything for itself, in
// the same order and so to the same bits. Thread: the engine's runner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "host/packed_exchange.h"
#include "host/plane.h"
#include "host/reduction.h"
#include "kernels/chunks.h"
#include "kernels/pieces.h"

namespace hvdlite {

class HostAllreduce {
 public:
  explicit HostAllreduce(HostPlane& plane) : plane_(plane), packed_(plane) {}  // borrowed
  // `layout` is that of call.group. Any op but kAdasum.
  Status run(const HostLayout& layout, const Allreduce& call, Patience patience);

 private:
  // One all-reduce under way.
  struct Batch {
    const HostLayout& layout;
    const PieceList& pieces;
    ElementTypes types;
    HostReduction reduction;
    Patience patience;
    std::uint64_t element_bytes;  // of what travels
    bool own_slice_in_place;      // a driver reads the input of its own slice where it lies
    bool saves;                   // some piece asks for a copy of its input
    bool packs;                   // some piece travels packed between hosts

    // Where an even cut would divide a block of a batch that packs, it moves to the block's begin.
    Range cut(Range even) const {
      if (!packs) return even;
      return {pieces.block_begin(even.begin, kPackedBlock),
              pieces.block_begin(even.end, kPackedBlock)};
    }
    Range part(Range whole, std::uint64_t parts, std::uint64_t index) const {
      return cut(part_of(whole, element_bytes, parts, index));
    }
    std::uint64_t elements_per_chunk(std::uint64_t chunk_bytes) const;
  };
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
  Status reduce_chunks(const Batch& batch);

  // (1) Publishes this rank's input of the chunk.
  Status publish(const Chunk& chunk);
  // (2) As a driver, reduces its slice over the locals; then (3) and (4), or (4) alone on one host.
  Status reduce_slice(const Chunk& chunk);
  // (3) Exchanges the slice, which lies in the own buffer, with the peers, by one of the two below;
  // `parts` are its parts by host.
  Status reduce_across_hosts(const Chunk& chunk, Range slice);
  Status exchange_parts(const Chunk& chunk, const std::vector<Range>& parts);
  // (4) Ends the reduction of `range` from `sources`, each at range.begin, where null is this
  // rank's input as it lies in memory. The result goes to `to`, unless that is null, and to the
  // outputs; of a group on many hosts (3) still writes the slice to the outputs as a whole.
  void finish(const Batch& batch, Range range, Sources sources, std::byte* to);
  // (5) Takes the results of the other drivers, and ends the step.
  Status take_results(const Chunk& chunk);

  // finish() where elements are cast on the way back.
  void finish_cast(const Batch& batch, Range range, Sources sources, std::byte* to);
  // Makes the copies that the pieces ask for. Ranges come in ascending order, each before anything
  // in it is overwritten.
  void save_inputs(const Batch& batch, Range range) const;
  // Copies this rank's elements of `range`, prescaled and cast, to `to`.
  void copy_in(const Batch& batch, Range range, std::byte* to) const;
  // Copies results to the outputs, where elements are cast back.
  void copy_out(const Batch& batch, Range range, const std::byte* from) const;

  HostPlane& plane_;
  PackedExchange packed_;
  // Memory that is kept between batches. What is in it belongs to the one function that fills it,
  // and to what that calls.
  PieceList pieces_;
  std::vector<std::byte> received_;  // parts of the slice from other hosts
  std::vector<std::byte> narrow_;    // a small result before it is cast back
};

}  // namespace hvdlite
