// The collective calls, queries of a communicator, and reduce operations.
#include <cstring>

#include "nccl/group.h"

using namespace fakegpu;

FAKE_API const char* ncclGetErrorString(ncclResult_t code) {
  constexpr const char* kTexts[] = {
      "no error",
      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error",
      "NCCL operation in progress"};
  return code >= 0 && code <= ncclInProgress ? kTexts[code] : "unknown result code";
}

FAKE_API const char* ncclGetLastError(ncclComm_t) {
  thread_local std::string text;
  text = last_error();
  return text.c_str();
}

FAKE_API ncclResult_t ncclGroupStart() {
  begin_group();
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclGroupEnd() { return end_group(); }

FAKE_API ncclResult_t ncclAllReduce(const void* input, void* output, std::size_t count,
                                    ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t communicator,
                                    ncclStream_t stream) {
  return submit("ncclAllReduce", communicator, stream,
                {{Kind::kAllReduce, dtype, op, 0, count}, input, output});
}

FAKE_API ncclResult_t ncclBroadcast(const void* input, void* output, std::size_t count,
                                    ncclDataType_t dtype, int root, ncclComm_t communicator,
                                    ncclStream_t stream) {
  return submit("ncclBroadcast", communicator, stream,
                {{Kind::kBroadcast, dtype, ncclSum, root, count}, input, output});
}

FAKE_API ncclResult_t ncclReduce(const void* input, void* output, std::size_t count,
                                 ncclDataType_t dtype, ncclRedOp_t op, int root,
                                 ncclComm_t communicator, ncclStream_t stream) {
  return submit("ncclReduce", communicator, stream,
                {{Kind::kReduce, dtype, op, root, count}, input, output});
}

FAKE_API ncclResult_t ncclAllGather(const void* input, void* output, std::size_t count,
                                    ncclDataType_t dtype, ncclComm_t communicator,
                                    ncclStream_t stream) {
  return submit("ncclAllGather", communicator, stream,
                {{Kind::kAllGather, dtype, ncclSum, 0, count}, input, output});
}

FAKE_API ncclResult_t ncclReduceScatter(const void* input, void* output, std::size_t count,
                                        ncclDataType_t dtype, ncclRedOp_t op,
                                        ncclComm_t communicator, ncclStream_t stream) {
  return submit("ncclReduceScatter", communicator, stream,
                {{Kind::kReduceScatter, dtype, op, 0, count}, input, output});
}

FAKE_API ncclResult_t ncclSend(const void* input, std::size_t count, ncclDataType_t dtype, int peer,
                               ncclComm_t communicator, ncclStream_t stream) {
  return submit("ncclSend", communicator, stream,
                {{Kind::kSend, dtype, ncclSum, 0, count}, input, nullptr, peer});
}

FAKE_API ncclResult_t ncclRecv(void* output, std::size_t count, ncclDataType_t dtype, int peer,
                               ncclComm_t communicator, ncclStream_t stream) {
  return submit("ncclRecv", communicator, stream,
                {{Kind::kRecv, dtype, ncclSum, 0, count}, nullptr, output, peer});
}

namespace {

// Gives `value(communicator)` to the caller.
template <typename Value>
ncclResult_t ask(ncclComm_t handle, int* out, Value&& value) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr) return fail(ncclInvalidArgument, "comm is not a communicator");
  *out = value(*communicator);
  return ncclSuccess;
}

}  // namespace

FAKE_API ncclResult_t ncclCommCount(ncclComm_t handle, int* out) {
  return ask(handle, out, [](const Communicator& c) { return c.size(); });
}

FAKE_API ncclResult_t ncclCommUserRank(ncclComm_t handle, int* out) {
  return ask(handle, out, [](const Communicator& c) { return c.rank(); });
}

FAKE_API ncclResult_t ncclCommCuDevice(ncclComm_t handle, int* out) {
  return ask(handle, out, [](const Communicator& c) { return c.device; });
}

FAKE_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* out, void* scalar, ncclDataType_t dtype,
                                               int residence, ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr || dtype < 0 || dtype > ncclBfloat16) {
    return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum : invalid argument");
  }
  const void* from = scalar;
  const std::size_t bytes = element_bytes(dtype);
  if (residence == ncclScalarDevice) from = fake_resolve(communicator->device, scalar, bytes);
  if (from == nullptr) return fail(ncclInvalidArgument, "the scalar is not on the device");
  std::uint64_t bits = 0;
  std::memcpy(&bits, from, bytes);
  *out = communicator->add_scale(bits);
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr || !communicator->remove_scale(op)) {
    return fail(ncclInvalidArgument, "ncclRedOpDestroy : invalid reduction operation");
  }
  return ncclSuccess;
}
