// Element types and reduce operations, as numbers that are the same on the wire, in Python and
// here.
#pragma once

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
  kBool = 9,  // allgather and broadcast only
};
inline constexpr int kDataTypeCount = 10;

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

// The element type of tensors in memory, and of what travels: another one, where it is narrower.
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
  constexpr std::size_t kSizes[kDataTypeCount] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};
  return kSizes[static_cast<int>(dtype)];
}

// "float32", "bool"...; "average", "sum"...
constexpr std::string_view name_of(DataType dtype) {
  constexpr std::string_view kNames[kDataTypeCount] = {"uint8",   "int8",    "int16",    "int32",
                                                       "int64",   "float16", "bfloat16", "float32",
                                                       "float64", "bool"};
  return kNames[static_cast<int>(dtype)];
}
constexpr std::string_view name_of(DeviceType device) {
  return device == DeviceType::kHost ? "host memory" : "a GPU";
}
constexpr std::string_view name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kAverage:
      return "average";
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAdasum:
      return "adasum";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
  }
  return "unknown";
}
constexpr bool is_floating(DataType dtype) {
  return dtype >= DataType::kFloat16 && dtype <= DataType::kFloat64;
}
constexpr bool is_valid_dtype(int value) { return value >= 0 && value < kDataTypeCount; }
constexpr bool is_valid_op(int value) { return value >= 0 && value <= 5; }

}  // namespace hvdlite
