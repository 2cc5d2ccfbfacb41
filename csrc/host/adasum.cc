#include "host/adasum.h"

#include <algorithm>

#include "kernels/reduce.h"

namespace hvdlite {

Status AdasumReduction::run(Backend& backend, int rank, const Allreduce& call, Patience patience) {
  const Group& group = call.group;
  const DataType dtype = call.types.memory;
  const std::span<const Piece> pieces = call.pieces;
  pieces_.assign(pieces, dtype);
  const Range all{0, pieces_.elements()};
  if (all.count() == 0) return Status();
  const std::size_t size = group.ranks.size();
  const std::size_t element_bytes = size_of(dtype);
  const auto part_at = [&](std::size_t i) { return part_of(all, element_bytes, size, i); };
  const Range part = part_at(static_cast<std::size_t>(group.index_of(rank)));
  const std::size_t part_bytes = part.count() * element_bytes;
  std::vector<std::size_t> bytes;
  for (std::size_t i = 0; i < size; ++i) bytes.push_back(part_at(i).count() * element_bytes);

  whole_.resize(all.count() * element_bytes);
  received_.resize(size * part_bytes);
  pieces_.for_each(all, [&](const Piece& piece, const std::byte* input, std::byte*,
                            std::uint64_t at, std::uint64_t count) {
    scale_copy(dtype, input, whole_.data() + at * element_bytes, count, piece.prescale);
  });
  HVDLITE_RETURN_IF_ERROR(backend.alltoall(
      {group, whole_, bytes, received_, std::vector<std::size_t>(size, part_bytes)}, patience));
  find_segments(pieces, part);
  if (dtype == DataType::kFloat64) {
    std::vector<double*> vectors;
    for (std::size_t i = 0; i < size; ++i) {
      vectors.push_back(reinterpret_cast<double*>(received_.data() + i * part_bytes));
    }
    HVDLITE_RETURN_IF_ERROR(combine(backend, group, vectors, pieces.size(), patience));
  } else {
    wide_.resize(size * part.count());
    scale_copy({dtype, DataType::kFloat32}, received_.data(), wide_.data(), wide_.size(), 1.0);
    std::vector<float*> vectors;
    for (std::size_t i = 0; i < size; ++i) vectors.push_back(wide_.data() + i * part.count());
    HVDLITE_RETURN_IF_ERROR(combine(backend, group, vectors, pieces.size(), patience));
    scale_copy({DataType::kFloat32, dtype}, wide_.data(), received_.data(), part.count(), 1.0);
  }
  HVDLITE_RETURN_IF_ERROR(
      backend.allgather({group, {received_.data(), part_bytes}, bytes, whole_}, patience));
  pieces_.for_each(all, [&](const Piece& piece, const std::byte*, std::byte* output,
                            std::uint64_t at, std::uint64_t count) {
    scale_copy(dtype, whole_.data() + at * element_bytes, output, count, piece.postscale);
  });
  return Status();
}

void AdasumReduction::find_segments(std::span<const Piece> pieces, Range part) {
  segments_.clear();
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const std::uint64_t begin = std::max(at, part.begin);
    at += pieces[i].count;
    const std::uint64_t end = std::min(at, part.end);
    if (begin < end) segments_.push_back({i, begin - part.begin, end - begin});
  }
}

template <typename T>
Status AdasumReduction::combine(Backend& backend, const Group& group, std::vector<T*> vectors,
                                std::size_t pieces, Patience patience) {
  while (vectors.size() > 1) {
    const std::size_t pairs = vectors.size() / 2;
    dots_.assign(pairs * pieces, {});
    for (std::size_t p = 0; p < pairs; ++p) {
      for (const Segment& segment : segments_) {
        dots_[p * pieces + segment.piece] = adasum_dots<T>(
            vectors[2 * p] + segment.begin, vectors[2 * p + 1] + segment.begin, segment.count);
      }
    }
    static_assert(sizeof(AdasumDots) == 3 * sizeof(double));
    const Piece sums{dots_.data(), dots_.data(), 3 * dots_.size(), 1.0, 1.0};
    HVDLITE_RETURN_IF_ERROR(
        backend.allreduce({group, DataType::kFloat64, ReduceOp::kSum, {&sums, 1}}, patience));
    for (std::size_t p = 0; p < pairs; ++p) {
      for (const Segment& segment : segments_) {
        adasum_combine<T>(vectors[2 * p] + segment.begin, vectors[2 * p + 1] + segment.begin,
                          segment.count, dots_[p * pieces + segment.piece]);
      }
    }
    // The first of each pair goes on, and the odd one out.
    std::size_t kept = 0;
    for (std::size_t i = 0; i < vectors.size(); i += 2) vectors[kept++] = vectors[i];
    vectors.resize(kept);
  }
  return Status();
}

}  // namespace hvdlite
