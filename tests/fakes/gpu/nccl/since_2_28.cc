#include "nccl/group.h"

using namespace fakegpu;

FAKE_API ncclResult_t ncclAlltoAll(const void* input, void* output, std::size_t count,
                                   ncclDataType_t dtype, ncclComm_t communicator,
                                   ncclStream_t stream) {
  return submit("ncclAlltoAll", communicator, stream,
                {{Kind::kAlltoAll, dtype, ncclSum, 0, count}, input, output});
}
