#include "kernels/finite.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/reduce.h"

namespace hvdlite {
namespace {

constexpr std::size_t kBlock = 1024;

// The exponent of an infinity or NaN is all ones.
template <typename Bits, Bits exponent>
std::size_t find(const std::byte* from, std::size_t count) {
  Bits bits[kBlock];
  std::memcpy(bits, from, count * sizeof(Bits));
  bool found = false;
  for (std::size_t i = 0; i < count; ++i) found |= (bits[i] & exponent) == exponent;
  if (!found) return count;
  const auto is_nonfinite = [](Bits one) { return (one & exponent) == exponent; };
  return static_cast<std::size_t>(std::find_if(bits, bits + count, is_nonfinite) - bits);
}

std::size_t find(DataType dtype, const std::byte* from, std::size_t count) {
  switch (dtype) {
    case DataType::kFloat16:
      return find<std::uint16_t, 0x7c00>(from, count);
    case DataType::kBfloat16:
      return find<std::uint16_t, 0x7f80>(from, count);
    case DataType::kFloat32:
      return find<std::uint32_t, 0x7f800000>(from, count);
    default:
      return find<std::uint64_t, 0x7ff0000000000000>(from, count);
  }
}

}  // namespace

std::size_t first_nonfinite(ElementTypes types, const void* source, std::size_t count,
                            double factor) {
  if (is_complex(types.memory)) {
    return first_nonfinite(component_of(types.memory), source, 2 * count, factor) / 2;
  }
  const bool as_it_is = !types.cast() && factor == 1.0;
  std::byte sent[kBlock * sizeof(double)];
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t block = std::min(kBlock, count - at);
    const std::byte* from = static_cast<const std::byte*>(source) + at * size_of(types.memory);
    if (!as_it_is) scale_copy(types, from, sent, block, factor);
    const std::size_t found = find(types.wire, as_it_is ? from : sent, block);
    if (found < block) return at + found;
  }
  return count;
}

}  // namespace hvdlite
