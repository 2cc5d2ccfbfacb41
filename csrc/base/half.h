// 16-bit floats: conversions to and from float32, rounding to nearest even, as the processor's own
// instructions do. Pure, portable.
#pragma once

#include <bit>
#include <cstdint>

namespace hvdlite {

struct Float16 {
  std::uint16_t bits;
};
struct Bfloat16 {
  std::uint16_t bits;
};

inline float to_float(Bfloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

inline Bfloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) {  // NaN: keep it one, and quiet
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40)};
  }
  const std::uint32_t rounding = 0x7fff + ((bits >> 16) & 1);
  return {static_cast<std::uint16_t>((bits + rounding) >> 16)};
}

inline float to_float(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fff;
  if (magnitude >= 0x7c00) {  // infinity, or NaN made quiet
    const std::uint32_t fraction = (magnitude & 0x3ff) << 13;
    return std::bit_cast<float>(sign | 0x7f800000 | fraction | (fraction != 0 ? 0x400000 : 0));
  }
  if (magnitude >= 0x400) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000));
  // Subnormal: an exact small integer times 2^-24.
  const float small = static_cast<float>(magnitude) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(small));
}

inline Float16 to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000);
  const std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {  // NaN
    return {static_cast<std::uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff))};
  }
  if (magnitude >= 0x477ff000) return {static_cast<std::uint16_t>(sign | 0x7c00)};  // overflow
  if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 lets the float unit round at the right bit.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {
        static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000))};
  }
  const std::uint32_t rounding = 0xfff + ((magnitude >> 13) & 1);
  return {static_cast<std::uint16_t>(sign | ((magnitude + rounding - 0x38000000) >> 13))};
}

}  // namespace hvdlite
