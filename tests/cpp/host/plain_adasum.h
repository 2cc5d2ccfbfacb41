// Adaptive summation in float64, written down as the formula is.
#pragma once

#include <cstddef>
#include <vector>

namespace hvdlite::testing {

using Vector = std::vector<double>;

inline double dot(const Vector& a, const Vector& b) {
  double total = 0;
  for (std::size_t i = 0; i < a.size(); ++i) total += a[i] * b[i];
  return total;
}

inline Vector plain_adasum(const Vector& a, const Vector& b) {
  const double aa = dot(a, a);
  const double bb = dot(b, b);
  const double ab = dot(a, b);
  Vector result;
  for (std::size_t i = 0; i < a.size(); ++i) {
    result.push_back((aa == 0 ? 1 : 1 - ab / (2 * aa)) * a[i] +
                     (bb == 0 ? 1 : 1 - ab / (2 * bb)) * b[i]);
  }
  return result;
}

inline Vector plain_adasum(std::vector<Vector> vectors) {
  while (vectors.size() > 1) {
    std::vector<Vector> next;
    for (std::size_t i = 0; i + 1 < vectors.size(); i += 2) {
      next.push_back(plain_adasum(vectors[i], vectors[i + 1]));
    }
    if (vectors.size() % 2 == 1) next.push_back(vectors.back());
    vectors = next;
  }
  return vectors[0];
}

}  // namespace hvdlite::testing
