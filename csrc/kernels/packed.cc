#include "kernels/packed.h"

#include <algorithm>

#include "kernels/packed_variants.h"

namespace hvdlite {

namespace {

const PackedLoops& loops() {
  static const PackedLoops& best = best_packed_loops();
  return best;
}

// Calls visit(at, bytes, n) for each block of numbers that are widened one block at a time.
template <typename Visit>
void for_each_block(std::size_t count, Visit visit) {
  for (std::size_t at = 0; at < count; at += kPackedBlock) {
    visit(at, packed_bytes(at), std::min(kPackedBlock, count - at));
  }
}

}  // namespace

void pack(DataType dtype, const void* from, std::size_t count, std::byte* to) {
  if (dtype == DataType::kFloat32) return loops().pack(static_cast<const float*>(from), count, to);
  const auto* numbers = static_cast<const std::byte*>(from);
  for_each_block(count, [&](std::size_t at, std::size_t bytes, std::size_t block) {
    float wide[kPackedBlock];
    scale_copy({dtype, DataType::kFloat32}, numbers + at * size_of(dtype), wide, block, 1.0);
    loops().pack(wide, block, to + bytes);
  });
}

void unpack(DataType dtype, const std::byte* from, std::size_t count, void* to) {
  if (dtype == DataType::kFloat32) return loops().unpack(from, count, static_cast<float*>(to));
  auto* numbers = static_cast<std::byte*>(to);
  for_each_block(count, [&](std::size_t at, std::size_t bytes, std::size_t block) {
    float wide[kPackedBlock];
    loops().unpack(from + bytes, block, wide);
    scale_copy({DataType::kFloat32, dtype}, wide, numbers + at * size_of(dtype), block, 1.0);
  });
}

void sum_packed(std::span<const std::byte* const> sources, std::size_t count, const Finish& finish,
                std::byte* to) {
  loops().sum(sources, count, finish, to);
}

}  // namespace hvdlite
