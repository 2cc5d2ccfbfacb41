#include "nccl/nccl_abi.h"

FAKE_API ncclResult_t ncclGetVersion(int* version) {
  *version = static_cast<int>(fake_option("FAKE_NCCL_VERSION", -1, FAKE_NCCL_VERSION));
  return ncclSuccess;
}
