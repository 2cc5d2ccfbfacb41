// One all-reduce under way on the host data plane: its cuts, and the arithmetic and copies between
// tensors and buffers. HostAllreduce makes it, and lends it what its fields refer to. Thread: the
// engine's runner.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/plane.h"
#include "host/reduction.h"
#include "kernels/pieces.h"

namespace hvdlite {

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

}  // namespace hvdlite
