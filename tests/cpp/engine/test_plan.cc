// The arithmetic of chunks, slices and parts, and the view of a batch as one run of elements.
#include <vector>

#include "check.h"
#include "kernels/pieces.h"

using namespace hvdlite;

namespace {

// The arguments with which for_each gave one part of a piece.
struct Visit {
  std::size_t piece = 0;
  std::uint64_t skipped = 0;  // bytes of the piece before the part
  std::uint64_t at = 0;
  std::uint64_t count = 0;
  bool operator==(const Visit&) const = default;
};

// Pieces of the given lengths over memory that is never touched.
struct UntouchedPieces {
  explicit UntouchedPieces(const std::vector<std::size_t>& counts) {
    for (const std::size_t count : counts) pieces.push_back({&memory, &memory, count});
    list.assign(pieces, DataType::kFloat32);
  }
  std::vector<Visit> visits(Range range) const {
    std::vector<Visit> seen;
    list.for_each(range, [&](const Piece& piece, const std::byte* input, std::byte* output,
                             std::uint64_t at, std::uint64_t count) {
      const auto skipped =
          reinterpret_cast<std::uintptr_t>(input) - reinterpret_cast<std::uintptr_t>(piece.input);
      CHECK_EQ(skipped, reinterpret_cast<std::uintptr_t>(output) -
                            reinterpret_cast<std::uintptr_t>(piece.output));
      seen.push_back({static_cast<std::size_t>(&piece - pieces.data()), skipped, at, count});
    });
    return seen;
  }
  float memory[64] = {};
  std::vector<Piece> pieces;
  PieceList list;
};

}  // namespace

TEST(plan_parts_of_every_element_size_start_on_cache_lines) {
  for (const std::uint64_t element_bytes : {1, 2, 4, 8}) {
    for (const std::uint64_t count : {0, 1, 63, 64, 65, 4095, 4096, 4097}) {
      for (const std::uint64_t parts : {1, 2, 3, 5, 64, 1000}) {
        std::uint64_t at = 0;
        for (std::uint64_t i = 0; i < parts; ++i) {
          const Range part = part_of({0, count}, element_bytes, parts, i);
          CHECK_EQ(part.begin, at);
          CHECK(part.count() == 0 || part.begin * element_bytes % kCutBytes == 0);
          at = part.end;
        }
        CHECK_EQ(at, count);
      }
    }
  }
}

TEST(plan_parts_differ_by_at_most_one_share) {
  for (std::uint64_t parts = 1; parts < 9; ++parts) {
    const Range first = part_of({0, 1 << 20}, 4, parts, 0);
    CHECK(first.count() * parts < (1 << 20) + parts * 16);
  }
}

TEST(plan_chunks_cover_more_than_a_32_bit_count) {
  const std::uint64_t elements = (std::uint64_t{5} << 31) + 3;
  const std::uint64_t per_chunk = 65536 / 4;
  const std::uint64_t chunks = chunk_count(elements, per_chunk);
  CHECK_EQ(chunks, (std::uint64_t{5} << 31) / per_chunk + 1);
  CHECK_EQ(chunk_at(elements, per_chunk, chunks - 2).end, std::uint64_t{5} << 31);
  CHECK_EQ(chunk_at(elements, per_chunk, chunks - 1).count(), std::uint64_t{3});
  CHECK_EQ(chunk_at(elements, per_chunk, chunks).count(), std::uint64_t{0});
  CHECK_EQ(chunk_count(0, per_chunk), std::uint64_t{0});
}

TEST(plan_piece_list_counts_beyond_32_bits) {
  UntouchedPieces batch({std::size_t{1} << 33, 7});
  CHECK_EQ(batch.list.elements(), (std::uint64_t{1} << 33) + 7);
  const std::uint64_t border = std::uint64_t{1} << 33;
  CHECK(batch.visits({border - 2, border + 3}) ==
        std::vector<Visit>{{0, (border - 2) * 4, 0, 2}, {1, 0, 2, 3}});
}
