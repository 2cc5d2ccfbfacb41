// The part of DLPack's C exchange interface, version 1, that reads a tensor without Python calls.
//
// A framework's tensor type has the attribute `__dlpack_c_exchange_api__`: a capsule that holds the
// address of a table of functions, which lives as long as the process. The layouts are DLPack's:
// https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>
#include <optional>

#include "base/dtype.h"

namespace hvdlite::dlpack {

struct Device {
  std::int32_t type;
  std::int32_t number;
};
inline constexpr std::int32_t kCpu = 1;   // host memory
inline constexpr std::int32_t kCuda = 2;  // It is the memory of an NVIDIA GPU.

struct ElementType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t dimensions;
  ElementType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: contiguous
  std::uint64_t byte_offset;

  void* address() const { return static_cast<char*>(data) + byte_offset; }
};

struct Exchange {
  std::uint32_t major;
  std::uint32_t minor;
  const Exchange* previous;
  void* allocate;
  void* share;
  void* adopt;
  // Fills in `out`, whose arrays the object keeps; -1 with a Python error. Needs the GIL.
  int (*read)(void* object, Tensor* out);
  void* stream;
};
inline constexpr std::uint32_t kMajor = 1;
inline constexpr const char* kCapsuleName = "dlpack_exchange_api";

// Nothing where the core has no such type, or this interface has no common name for it.
inline std::optional<DataType> core_type(ElementType type) {
  struct Row {
    std::uint8_t code, bits;
    DataType dtype;
  };
  constexpr std::uint8_t kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6;
  constexpr Row kRows[] = {
      {kFloat, 32, DataType::kFloat32},     {kFloat, 16, DataType::kFloat16},
      {kFloat, 64, DataType::kFloat64},     {kBfloat, 16, DataType::kBfloat16},
      {kInt, 64, DataType::kInt64},         {kInt, 32, DataType::kInt32},
      {kInt, 16, DataType::kInt16},         {kInt, 8, DataType::kInt8},
      {kUint, 8, DataType::kUint8},         {kUint, 16, DataType::kUint16},
      {kUint, 32, DataType::kUint32},       {kUint, 64, DataType::kUint64},
      {kComplex, 64, DataType::kComplex64}, {kComplex, 128, DataType::kComplex128},
      {kComplex, 32, DataType::kComplex32}, {kBool, 8, DataType::kBool},
  };
  for (const Row& row : kRows) {
    if (row.code == type.code && row.bits == type.bits && type.lanes == 1) return row.dtype;
  }
  return std::nullopt;
}

inline bool contiguous(const Tensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t expected = 1;
  bool fits = true;
  for (std::int32_t i = tensor.dimensions - 1; i >= 0; --i) {
    if (tensor.shape[i] == 0) return true;
    fits = fits && (tensor.shape[i] == 1 || tensor.strides[i] == expected);
    expected *= tensor.shape[i];
  }
  return fits;
}

}  // namespace hvdlite::dlpack
