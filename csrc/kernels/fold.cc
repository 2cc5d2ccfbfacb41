#include "kernels/fold.h"

#include "base/dtype.h"

namespace hvdlite {
namespace {

template <typename T>
struct Element {
  using Sum = T;
  static T widen(T value) { return value; }
  static T narrow(T value) { return value; }
};
template <>
struct Element<Float16> {
  using Sum = float;
  static float widen(Float16 value) { return to_float(value); }
  static Float16 narrow(float value) { return to_float16(value); }
};
template <>
struct Element<Bfloat16> {
  using Sum = float;
  static float widen(Bfloat16 value) { return to_float(value); }
  static Bfloat16 narrow(float value) { return to_bfloat16(value); }
};

// Calls visit with a value of the element type.
template <typename Visit>
void with_type(DataType dtype, Visit&& visit) {
  switch (dtype) {
    case DataType::kFloat16:
      return visit(Float16{});
    case DataType::kBfloat16:
      return visit(Bfloat16{});
    case DataType::kFloat64:
      return visit(double{});
    default:
      return visit(float{});
  }
}

}  // namespace

void fold_in(DataType dtype, void* sum, const void* from, std::size_t count, double weight) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    using Sum = typename Element<T>::Sum;
    auto* sums = static_cast<Sum*>(sum);
    const auto* values = static_cast<const T*>(from);
    const auto factor = static_cast<Sum>(weight);
    for (std::size_t i = 0; i < count; ++i) sums[i] += factor * Element<T>::widen(values[i]);
  });
}

void fold_out(DataType dtype, const void* sum, const void* from, void* to, std::size_t count,
              double weight, double total) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    using Sum = typename Element<T>::Sum;
    const auto* sums = static_cast<const Sum*>(sum);
    const auto* values = static_cast<const T*>(from);
    auto* results = static_cast<T*>(to);
    const auto factor = static_cast<Sum>(weight);
    const auto divisor = static_cast<Sum>(total);
    for (std::size_t i = 0; i < count; ++i) {
      const Sum own = weight == 0 ? Sum{} : factor * Element<T>::widen(values[i]);
      results[i] = Element<T>::narrow((sums[i] + own) / divisor);
    }
  });
}

}  // namespace hvdlite
