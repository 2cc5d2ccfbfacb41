#include <cstdint>
#include <cstring>

#include "kernels/stream_copy.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace hvdlite {

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
