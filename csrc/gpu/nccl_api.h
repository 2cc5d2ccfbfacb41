// The part of NCCL that the core uses, versions 2.19 to 2.32: a table of symbols that are found at
// run time in libnccl.so.2 (base/dylib.h).
//
// The declarations are ours; values and layouts are NCCL's stable binary interface. A table is
// immutable once loaded. Threads: any, one at a time per communicator.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/dtype.h"
#include "base/dylib.h"
#include "base/status.h"
#include "gpu/cuda_api.h"

namespace hvdlite {

using NcclComm = struct NcclCommTag*;

enum class NcclResult : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};
struct NcclUniqueId {
  char internal[128];
};
// The layout that 2.18 began; `version` and `size` tell newer libraries where it ends.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 0;
  int cluster_size = kUndefined;
  int min_blocks = kUndefined;
  int max_blocks = kUndefined;
  const char* network = nullptr;
  int split_share = kUndefined;
  static constexpr int kUndefined = INT32_MIN;
};
inline constexpr int kNcclScalarHostImmediate = 1;
inline constexpr int kOldestNccl = 21900;
inline constexpr int kNewestNccl = 23299;  // a newer one is used too, and the doctor says so

// X(field, symbol, arguments): every function returns an ncclResult_t. A stream is a cudaStream_t,
// which is the driver's CUstream.
#define HVDLITE_NCCL_SYMBOLS(X)                                                                    \
  X(get_version, "ncclGetVersion", (int* version))                                                 \
  X(get_unique_id, "ncclGetUniqueId", (NcclUniqueId * id))                                         \
  X(comm_init, "ncclCommInitRankConfig",                                                           \
    (NcclComm * comm, int size, NcclUniqueId id, int rank, NcclConfig* config))                    \
  X(comm_finalize, "ncclCommFinalize", (NcclComm comm))                                            \
  X(comm_destroy, "ncclCommDestroy", (NcclComm comm))                                              \
  X(comm_abort, "ncclCommAbort", (NcclComm comm))                                                  \
  X(comm_async_error, "ncclCommGetAsyncError", (NcclComm comm, NcclResult * error))                \
  X(premul_create, "ncclRedOpCreatePreMulSum",                                                     \
    (int* op, void* scalar, int dtype, int residence, NcclComm comm))                              \
  X(op_destroy, "ncclRedOpDestroy", (int op, NcclComm comm))                                       \
  X(group_start, "ncclGroupStart", ())                                                             \
  X(group_end, "ncclGroupEnd", ())                                                                 \
  X(allreduce, "ncclAllReduce",                                                                    \
    (const void* input, void* output, std::size_t count, int dtype, int op, NcclComm comm,         \
     CudaStream stream))                                                                           \
  X(broadcast, "ncclBroadcast",                                                                    \
    (const void* input, void* output, std::size_t count, int dtype, int root, NcclComm comm,       \
     CudaStream stream))                                                                           \
  X(allgather, "ncclAllGather",                                                                    \
    (const void* input, void* output, std::size_t count, int dtype, NcclComm comm,                 \
     CudaStream stream))                                                                           \
  X(reduce, "ncclReduce",                                                                          \
    (const void* input, void* output, std::size_t count, int dtype, int op, int root,              \
     NcclComm comm, CudaStream stream))                                                            \
  X(reducescatter, "ncclReduceScatter",                                                            \
    (const void* input, void* output, std::size_t count, int dtype, int op, NcclComm comm,         \
     CudaStream stream))                                                                           \
  X(send, "ncclSend",                                                                              \
    (const void* input, std::size_t count, int dtype, int peer, NcclComm comm, CudaStream stream)) \
  X(recv, "ncclRecv",                                                                              \
    (void* output, std::size_t count, int dtype, int peer, NcclComm comm, CudaStream stream))      \
  X(memory_allocate, "ncclMemAlloc", (void** memory, std::size_t bytes))                           \
  X(memory_free, "ncclMemFree", (void* memory))                                                    \
  X(comm_register, "ncclCommRegister",                                                             \
    (NcclComm comm, void* memory, std::size_t bytes, void** registration))                         \
  X(comm_deregister, "ncclCommDeregister", (NcclComm comm, void* registration))

struct NcclApi {
#define HVDLITE_NCCL_FIELD(field, symbol, arguments) NcclResult(*field) arguments = nullptr;
  HVDLITE_NCCL_SYMBOLS(HVDLITE_NCCL_FIELD)
#undef HVDLITE_NCCL_FIELD
  const char* (*error_string)(NcclResult error) = nullptr;
  const char* (*last_error)(NcclComm comm) = nullptr;

  std::string path;    // The library was opened from it.
  std::string origin;  // the place where it was found: "loaded already by the framework"...
  int version = 0;     // 22809 is 2.28.9
  Dylib library;       // keeps the functions alive

  // Looks for libnccl.so.2 in this order: a copy that is loaded already, `library` if not "", each
  // of `folders` (of the nvidia-nccl wheels), the system. The first place that has the library
  // decides. kInvalidArgument says why there is none, or why that one cannot be used.
  static Result<std::shared_ptr<const NcclApi>> load(const std::string& library,
                                                     std::span<const std::string> folders);
  // Makes the table of this library; `origin` is for people. kInvalidArgument says why it cannot be
  // used.
  static Result<std::shared_ptr<const NcclApi>> take(Dylib library, std::string origin);
};

// "2.28.9" of 22809.
std::string nccl_version_text(int version);
// NCCL's number of an element type; -1 when NCCL cannot reduce it (16-bit integers, complex
// numbers, types that are copied only).
int nccl_dtype(DataType dtype);

}  // namespace hvdlite
