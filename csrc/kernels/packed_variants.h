// The compiled variants of packed_loops.inc, for packed.cc and its test alone.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/packed.h"

namespace hvdlite {

// packed.h's functions, of float32.
struct PackedLoops {
  void (*pack)(const float* from, std::size_t count, std::byte* to);
  void (*unpack)(const std::byte* from, std::size_t count, float* to);
  void (*sum)(std::span<const std::byte* const> sources, std::size_t count, const Finish& finish,
              std::byte* to);
};

namespace portable {
extern const PackedLoops kPackedLoops;
}  // namespace portable
namespace avx2 {
// Defined on x86-64 only; called only where the processor has AVX2.
extern const PackedLoops kPackedLoops;
}  // namespace avx2

// The variant for this processor.
const PackedLoops& best_packed_loops();

}  // namespace hvdlite
