#include "kernels/adasum.h"

#include <algorithm>
#include <array>

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

}  // namespace hvdlite
