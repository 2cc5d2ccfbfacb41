// Reductions in ascending rank order. 16-bit floats are reduced in float32, with one rounding at
// the end.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/half.h"
#include "nccl/communicator.h"

namespace fakegpu {
namespace {

using hvdlite::Bfloat16;
using hvdlite::Float16;

float widen(Float16 value) { return hvdlite::to_float(value); }
float widen(Bfloat16 value) { return hvdlite::to_float(value); }
void narrow(float value, Float16& out) { out = hvdlite::to_float16(value); }
void narrow(float value, Bfloat16& out) { out = hvdlite::to_bfloat16(value); }
template <typename T>
T widen(T value) {
  return value;
}
template <typename T>
void narrow(T value, T& out) {
  out = value;
}

// Integers wrap around; unsigned arithmetic does so without being undefined.
template <typename T>
struct Wrapping {
  using Type = T;
};
template <typename T>
  requires std::is_integral_v<T>
struct Wrapping<T> {
  using Type = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
};

template <typename A>
A combine(int op, A a, A b) {
  using W = typename Wrapping<A>::Type;
  switch (op) {
    case ncclProd:
      return static_cast<A>(static_cast<W>(a) * static_cast<W>(b));
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return static_cast<A>(static_cast<W>(a) + static_cast<W>(b));
  }
}

template <typename T>
T load(const char* from, std::size_t index) {
  T value;
  std::memcpy(&value, from + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void reduce_as(const Descriptor& what, std::uint64_t scale_bits,
               const std::vector<const char*>& inputs, char* output, std::size_t count) {
  using A = decltype(widen(T{}));
  const A scale = widen(load<T>(reinterpret_cast<const char*>(&scale_bits), 0));
  const auto ranks = static_cast<A>(inputs.size());
  for (std::size_t i = 0; i < count; ++i) {
    A total{};
    for (std::size_t r = 0; r < inputs.size(); ++r) {
      A value = widen(load<T>(inputs[r], i));
      if (what.op == ncclNumOps) {  // the product is rounded to the type
        T product;
        narrow(combine<A>(ncclProd, value, scale), product);
        value = widen(product);
      }
      total = r == 0 ? value : combine<A>(what.op, total, value);
    }
    if (what.op == ncclAvg) total = static_cast<A>(total / ranks);
    T result;
    narrow(total, result);
    std::memcpy(output + i * sizeof(T), &result, sizeof(T));
  }
}

}  // namespace

std::size_t element_bytes(int dtype) {
  constexpr std::size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kBytes[dtype];
}

void reduce(const Descriptor& what, std::uint64_t scale, const std::vector<const char*>& inputs,
            char* output, std::size_t count) {
  switch (what.dtype) {
    case ncclInt8:
      return reduce_as<std::int8_t>(what, scale, inputs, output, count);
    case ncclUint8:
      return reduce_as<std::uint8_t>(what, scale, inputs, output, count);
    case ncclInt32:
      return reduce_as<std::int32_t>(what, scale, inputs, output, count);
    case ncclUint32:
      return reduce_as<std::uint32_t>(what, scale, inputs, output, count);
    case ncclInt64:
      return reduce_as<std::int64_t>(what, scale, inputs, output, count);
    case ncclUint64:
      return reduce_as<std::uint64_t>(what, scale, inputs, output, count);
    case ncclFloat16:
      return reduce_as<Float16>(what, scale, inputs, output, count);
    case ncclFloat32:
      return reduce_as<float>(what, scale, inputs, output, count);
    case ncclFloat64:
      return reduce_as<double>(what, scale, inputs, output, count);
    default:
      return reduce_as<Bfloat16>(what, scale, inputs, output, count);
  }
}

}  // namespace fakegpu
