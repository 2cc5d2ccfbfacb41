#include "kernels/adasum.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/half.h"

namespace hvdlite {
namespace {

// Independent sums, so that the compiler may use vector instructions without changing a bit.
constexpr std::size_t kLanes = 8;
using Lanes = std::array<double, kLanes>;

double sum(const Lanes& lanes) {
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

template <typename Half, typename Convert>
void widen_all(const void* from, float* to, std::size_t count, Convert convert) {
  for (std::size_t i = 0; i < count; ++i) {
    Half value;
    std::memcpy(&value, static_cast<const Half*>(from) + i, sizeof(value));
    to[i] = convert(value);
  }
}

template <typename Half, typename Convert>
void narrow_all(const float* from, void* to, std::size_t count, Convert convert) {
  for (std::size_t i = 0; i < count; ++i) {
    const Half value = convert(from[i]);
    std::memcpy(static_cast<Half*>(to) + i, &value, sizeof(value));
  }
}

}  // namespace

template <typename T>
AdasumDots adasum_dots(const T* a, const T* b, std::size_t count) {
  Lanes aa{};
  Lanes bb{};
  Lanes ab{};
  for (std::size_t i = 0; i < count; i += kLanes) {
    const std::size_t block = std::min(kLanes, count - i);
    for (std::size_t l = 0; l < block; ++l) {
      const double x = a[i + l];
      const double y = b[i + l];
      aa[l] += x * x;
      bb[l] += y * y;
      ab[l] += x * y;
    }
  }
  return {sum(aa), sum(bb), sum(ab)};
}

template <typename T>
void adasum_combine(T* a, const T* b, std::size_t count, const AdasumDots& dots) {
  const double of_a = dots.aa == 0 ? 1.0 : 1.0 - dots.ab / (2 * dots.aa);
  const double of_b = dots.bb == 0 ? 1.0 : 1.0 - dots.ab / (2 * dots.bb);
  for (std::size_t i = 0; i < count; ++i) a[i] = static_cast<T>(of_a * a[i] + of_b * b[i]);
}

template AdasumDots adasum_dots(const float*, const float*, std::size_t);
template AdasumDots adasum_dots(const double*, const double*, std::size_t);
template void adasum_combine(float*, const float*, std::size_t, const AdasumDots&);
template void adasum_combine(double*, const double*, std::size_t, const AdasumDots&);

void widen(DataType dtype, const void* from, float* to, std::size_t count) {
  if (dtype == DataType::kFloat16) {
    widen_all<Float16>(from, to, count, [](Float16 value) { return to_float(value); });
  } else if (dtype == DataType::kBfloat16) {
    widen_all<Bfloat16>(from, to, count, [](Bfloat16 value) { return to_float(value); });
  } else if (count > 0) {
    std::memcpy(to, from, count * sizeof(float));
  }
}

void narrow(DataType dtype, const float* from, void* to, std::size_t count) {
  if (dtype == DataType::kFloat16) {
    narrow_all<Float16>(from, to, count, [](float value) { return to_float16(value); });
  } else if (dtype == DataType::kBfloat16) {
    narrow_all<Bfloat16>(from, to, count, [](float value) { return to_bfloat16(value); });
  } else if (count > 0) {
    std::memcpy(to, from, count * sizeof(float));
  }
}

}  // namespace hvdlite
