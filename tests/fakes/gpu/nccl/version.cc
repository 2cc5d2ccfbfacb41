#include "nccl/nccl_abi.h"

FAKE_API ncclResult_t ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return ncclSuccess;
}
