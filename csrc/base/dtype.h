// Element types and reduce operations, as numbers that are the same on the wire, in Python and
// here.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace hvdlite {

enum class DataType : std::uint8_t {
  kUint8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kBfloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBool = 9,  // a byte that is 0 or 1; copied, and reduced where that is_logical()
  kUint16 = 10,
  kUint32 = 11,
  kUint64 = 12,
  kComplex64 = 13,  // a real part, then an imaginary one; without minima and maxima
  kComplex128 = 14,
  // All types from here on are copied only.
  kFloat8E4m3fn = 15,
  kFloat8E5m2 = 16,
  kFloat8E4m3fnuz = 17,
  kFloat8E5m2fnuz = 18,
  kFloat8E4m3b11fnuz = 19,
  kFloat8E8m0fnu = 20,
  kComplex32 = 21,
};
// A number is never used again for another type: numbers travel, and other builds know them.
inline constexpr int kDataTypeCount = 22;

// Where a tensor's memory is.
enum class DeviceType : std::uint8_t { kHost = 0, kGpu = 1 };

// Horovod's numbers, because scripts pass them around.
enum class ReduceOp : std::uint8_t {
  kAverage = 0,
  kSum = 1,
  kAdasum = 2,  // all-reduce of floating-point tensors only
  kMin = 3,
  kMax = 4,
  kProduct = 5,
};

// The element type that tensors have in memory, and the type that travels: the same one, or a
// narrower one that the data plane casts to.
struct ElementTypes {
  DataType memory;
  DataType wire;
  constexpr ElementTypes(DataType dtype) : ElementTypes(dtype, dtype) {}  // NOLINT: mostly the same
  constexpr ElementTypes(DataType in_memory, DataType on_wire) : memory(in_memory), wire(on_wire) {}
  constexpr bool cast() const { return memory != wire; }
  constexpr bool operator==(const ElementTypes&) const = default;
};

// Bytes of one element.
constexpr std::size_t size_of(DataType dtype) {
  constexpr std::size_t kSizes[kDataTypeCount] = {1, 1, 2, 4,  8, 2, 2, 4, 8, 1, 2,
                                                  4, 8, 8, 16, 1, 1, 1, 1, 1, 1, 4};
  return kSizes[static_cast<int>(dtype)];
}

// The name that frameworks use: "float32", "bool"...; "average", "sum"...
constexpr std::string_view name_of(DataType dtype) {
  constexpr std::string_view kNames[kDataTypeCount] = {
      "uint8",          "int8",        "int16",           "int32",           "int64",
      "float16",        "bfloat16",    "float32",         "float64",         "bool",
      "uint16",         "uint32",      "uint64",          "complex64",       "complex128",
      "float8_e4m3fn",  "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz",
      "float8_e8m0fnu", "complex32"};
  return kNames[static_cast<int>(dtype)];
}
constexpr std::string_view name_of(DeviceType device) {
  return device == DeviceType::kHost ? "host memory" : "a GPU";
}
constexpr std::string_view name_of(ReduceOp op) {
  constexpr std::string_view kNames[] = {"average", "sum", "adasum", "min", "max", "product"};
  return kNames[static_cast<int>(op)];
}
constexpr bool is_floating(DataType dtype) {
  return dtype >= DataType::kFloat16 && dtype <= DataType::kFloat64;
}
constexpr bool is_complex(DataType dtype) {
  return dtype == DataType::kComplex64 || dtype == DataType::kComplex128;
}
// True for what makes a bool of bools: all, any, and all again.
constexpr bool is_logical(ReduceOp op) {
  return op == ReduceOp::kMin || op == ReduceOp::kMax || op == ReduceOp::kProduct;
}
// The type and the operation by which the elements of a type are reduced.
constexpr DataType reduced_as(DataType dtype) {
  return dtype == DataType::kBool ? DataType::kUint8 : dtype;
}
constexpr ReduceOp reduced_by(DataType dtype, ReduceOp op) {
  return dtype == DataType::kBool && op == ReduceOp::kProduct ? ReduceOp::kMin : op;
}
// True for types whose elements can be added and scaled. Elements of other types are only copied.
constexpr bool computes(DataType dtype) {
  return dtype != DataType::kBool && dtype <= DataType::kComplex128;
}
constexpr bool is_integer(DataType dtype) {
  return computes(dtype) && !is_floating(dtype) && !is_complex(dtype);
}
// The type of a complex number's two parts; for any other type, that type itself.
constexpr DataType component_of(DataType dtype) {
  if (dtype == DataType::kComplex64) return DataType::kFloat32;
  return dtype == DataType::kComplex128 ? DataType::kFloat64 : dtype;
}
constexpr bool is_valid_dtype(int value) { return value >= 0 && value < kDataTypeCount; }
constexpr bool is_valid_op(int value) { return value >= 0 && value <= 5; }

// 16-bit floats: conversions to and from float32, rounding to nearest even, as the processor's own
// instructions do. Pure, portable.
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
