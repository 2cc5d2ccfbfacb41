// The part of NCCL's interface (2.19 to 2.28) that the fake offers, with the public numbers.
#pragma once

#include <cstddef>

#include "hooks.h"

using ncclComm_t = void*;
using ncclStream_t = void*;
using ncclRedOp_t = int;
struct ncclUniqueId {
  char internal[128];
};
// Newer libraries know more fields after these; `size` says how many the caller knows.
struct ncclConfig_t {
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};
inline constexpr unsigned kNcclConfigMagic = 0xcafebeef;

enum ncclResult_t : int {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};
enum ncclDataType_t : int {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
};
enum : ncclRedOp_t { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4, ncclNumOps };
inline constexpr int ncclScalarHostImmediate = 1;
