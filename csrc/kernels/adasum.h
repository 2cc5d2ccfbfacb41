// Adaptive summation of two vectors, after Maleki et al., "Scaling Distributed Training with
// Adaptive Summation" (MLSys 2021):
//
//   adasum(a, b) = (1 - a.b / (2 a.a)) a  +  (1 - a.b / (2 b.b)) b
//
// Orthogonal vectors add up; equal ones give their mean. Pure functions of memory; any thread.
#pragma once

#include <cstddef>

namespace hvdlite {

// The dot products of two vectors, or of a part of them: parts add up.
struct AdasumDots {
  double aa = 0;
  double bb = 0;
  double ab = 0;
};

template <typename T>
AdasumDots adasum_dots(const T* a, const T* b, std::size_t count);
// a = adasum(a, b), for dots of the whole vectors. A vector of norm 0 changes nothing.
template <typename T>
void adasum_combine(T* a, const T* b, std::size_t count, const AdasumDots& dots);

}  // namespace hvdlite
