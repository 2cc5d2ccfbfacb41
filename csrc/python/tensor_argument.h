// A tensor of a call, as Python describes it: `_core.Tensor`. It holds no memory alive.
#pragma once

#include <cstdint>

#include "engine/entry.h"

namespace hvdlite {

struct TensorArgument {
  TensorShape shape;
  const void* input = nullptr;
  void* output = nullptr;
  int gpu = kHostMemory;
  std::uint64_t capacity = 0;
};

}  // namespace hvdlite
