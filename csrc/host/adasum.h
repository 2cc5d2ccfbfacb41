// All-reduce by adaptive summation (kernels/adasum.h), made of a backend's other collectives.
//
// Each rank takes one part of the batch: an alltoall brings it that part from every rank, the rank
// combines them in pairs, level by level, and an allgather puts the results together. Ranks pair up
// with their neighbours (0 with 1, 2 with 3...), then the pairs do, and so on: a binary tree where
// the number of ranks is a power of two; otherwise the odd one out waits for the next level. The
// dot products of a pair are those of whole tensors: one all-reduce of a few float64 numbers per
// level. So no rank moves more bytes than in a plain all-reduce, and the bits are the same on every
// rank. It owns its buffers and keeps them between calls. Thread: the engine's runner.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "host/backend.h"
#include "kernels/adasum.h"
#include "kernels/pieces.h"

namespace hvdlite {

class AdasumReduction {
 public:
  // Runs an all-reduce of floating-point types by kAdasum on this rank, `rank`. Its parts run on
  // `backend`.
  Status run(Backend& backend, int rank, const Allreduce& call, Patience patience);

 private:
  // What of a tensor lies in this rank's part of the batch.
  struct Segment {
    std::size_t piece = 0;
    std::size_t begin = 0;  // elements after the begin of the part
    std::size_t count = 0;
  };
  void find_segments(std::span<const Piece> pieces, Range part);
  // Combines `vectors` of the part into the first one.
  template <typename T>
  Status combine(Backend& backend, const Group& group, std::vector<T*> vectors, std::size_t pieces,
                 Patience patience);

  PieceList pieces_;
  std::vector<std::byte> whole_;     // the batch: what this rank gives, then the result
  std::vector<std::byte> received_;  // this rank's part, as every rank gave it; then its result
  std::vector<float> wide_;          // the same in float32, where the type is narrower
  std::vector<Segment> segments_;
  std::vector<AdasumDots> dots_;  // pair by pair, tensor by tensor
};

}  // namespace hvdlite
