// The names that CUDA has built in and that csrc/gpu/cuda/kernels uses, so that the kernels compile
// as C++. A launch runs on one thread of the host, which sets the indices.
#pragma once

namespace fakegpu {

struct Index {
  unsigned x;
};

}  // namespace fakegpu

inline thread_local fakegpu::Index threadIdx;
inline thread_local fakegpu::Index blockIdx;
inline thread_local fakegpu::Index blockDim;
inline thread_local fakegpu::Index gridDim;
#define __device__
#define __global__
#define __grid_constant__
inline void atomicOr(unsigned* word, unsigned bits) { *word |= bits; }
