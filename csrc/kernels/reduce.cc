#include "kernels/reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/cpu.h"
#include "base/dtype.h"
#include "base/text.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace hvdlite::portable {
#include "kernels/reduce_loops.inc"
}  // namespace hvdlite::portable

namespace hvdlite {

ReduceFunction best_reduce() {
#if defined(__x86_64__)
  if (has_avx2_f16c()) return &avx2::reduce_any;
#endif
  return &portable::reduce_any;
}

CastFunction best_cast() {
#if defined(__x86_64__)
  if (has_avx2_f16c()) return &avx2::cast_any;
#endif
  return &portable::cast_any;
}

void no_such_reduction(DataType dtype, ReduceOp op) {
  log(LogLevel::kFatal, -1,
      "a bug in hvdlite: the processor was asked to reduce " + std::string(name_of(dtype)) +
          " by " + std::string(name_of(op)));
  std::abort();
}

void reduce(DataType dtype, ReduceOp op, std::span<const void* const> sources, void* destination,
            std::size_t count, const Finish& finish) {
  static const ReduceFunction kBest = best_reduce();
  kBest(dtype, op, sources, destination, count, finish);
}

void scale_copy(ElementTypes types, const void* source, void* destination, std::size_t count,
                double factor) {
  static const CastFunction kBest = best_cast();
  if (count == 0) return;
  if (types.cast()) return kBest(types, source, destination, count, factor);
  if (factor != 1.0) {
    return reduce(types.memory, ReduceOp::kSum, {&source, 1}, destination, count, {1, factor});
  }
  if (source != destination) std::memcpy(destination, source, count * size_of(types.memory));
}

namespace {

// Calls visit() with the types of the elements and of their sum, and a zero of the latter.
template <typename Visit>
void with_sum(DataType dtype, Visit&& visit) {
  if (dtype == DataType::kFloat64) return visit(ElementTypes(dtype), double{});
  visit(ElementTypes(dtype, DataType::kFloat32), float{});
}

// Elements that are widened at once.
constexpr std::size_t kFolded = 1024;

}  // namespace

void fold_in(DataType dtype, void* sum, const void* from, std::size_t count, double weight) {
  with_sum(dtype, [&](ElementTypes types, auto zero) {
    using Sum = decltype(zero);
    Sum wide[kFolded];
    for (std::size_t at = 0; at < count; at += kFolded) {
      const std::size_t block = std::min(kFolded, count - at);
      scale_copy(types, static_cast<const std::byte*>(from) + at * size_of(dtype), wide, block,
                 1.0);
      Sum* sums = static_cast<Sum*>(sum) + at;
      for (std::size_t i = 0; i < block; ++i) sums[i] += static_cast<Sum>(weight) * wide[i];
    }
  });
}

void fold_out(DataType dtype, const void* sum, const void* from, void* to, std::size_t count,
              double weight, double total) {
  with_sum(dtype, [&](ElementTypes types, auto zero) {
    using Sum = decltype(zero);
    Sum wide[kFolded] = {};
    for (std::size_t at = 0; at < count; at += kFolded) {
      const std::size_t block = std::min(kFolded, count - at);
      const std::size_t offset = at * size_of(dtype);
      if (weight != 0) {
        scale_copy(types, static_cast<const std::byte*>(from) + offset, wide, block, 1.0);
      }
      const Sum* sums = static_cast<const Sum*>(sum) + at;
      for (std::size_t i = 0; i < block; ++i) {
        const Sum own = weight == 0 ? zero : static_cast<Sum>(weight) * wide[i];
        wide[i] = (sums[i] + own) / static_cast<Sum>(total);
      }
      scale_copy({types.wire, types.memory}, wide, static_cast<std::byte*>(to) + offset, block,
                 1.0);
    }
  });
}

#if defined(__x86_64__)
namespace {

constexpr std::size_t kLine = 64;
// The fence that ends a streamed copy costs more than the caches of a shorter one.
constexpr std::size_t kLeastStreamed = 4096;

}  // namespace

void stream_copy(const void* source, void* destination, std::size_t bytes) {
  if (bytes == 0) return;
  if (bytes < kLeastStreamed) {
    std::memcpy(destination, source, bytes);
    return;
  }
  const auto* from = static_cast<const std::byte*>(source);
  auto* to = static_cast<std::byte*>(destination);
  // A store that does not fill its cache line is a slow one, so these are left to memcpy.
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(to) % kLine;
  const std::size_t streamed = (bytes - before) / kLine * kLine;
  std::memcpy(to, from, before);
  from += before;
  to += before;
  for (std::size_t at = 0; at < streamed; at += kLine) {
    for (std::size_t i = at; i < at + kLine; i += sizeof(__m128i)) {
      const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), word);
    }
  }
  std::memcpy(to + streamed, from + streamed, bytes - before - streamed);
  _mm_sfence();  // streamed stores are not in order with others
}
#else
void stream_copy(const void* source, void* destination, std::size_t bytes) {
  if (bytes > 0) std::memcpy(destination, source, bytes);
}
#endif

}  // namespace hvdlite
