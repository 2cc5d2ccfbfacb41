// The functions of the library.
#include <chrono>
#include <thread>

#include "nccl/communicator.h"

extern "C" int cuDriverGetVersion(int* version);

using namespace fakegpu;

namespace {

// The oldest driver that an NCCL built for CUDA 12 takes.
constexpr int kOldestDriver = 12000;
constexpr int kVersion = 22807;

ncclResult_t no_communicator() { return fail(ncclInvalidArgument, "comm is not a communicator"); }

ncclResult_t join_late(Communicator& communicator, const ncclUniqueId& id) {
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  if (communicator.aborted()) return fail(ncclRemoteError, "aborted");
  int version = 0;
  cuDriverGetVersion(&version);
  if (version < kOldestDriver) {
    return fail(ncclUnhandledCudaError,
                "Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'");
  }
  if (const int failure = fake_take_failure("ncclCommInitRank", communicator.device)) {
    return fail(static_cast<ncclResult_t>(failure), "injected failure of init");
  }
  return communicator.join(id);
}

// Ends the communicator of a handle, once nothing of it runs.
ncclResult_t end(void* handle, bool abort) {
  const std::shared_ptr<Communicator> communicator = communicators().remove(handle);
  if (communicator == nullptr) return no_communicator();
  if (abort) communicator->abort();
  communicator->wait_for_work();
  end_registrations(handle, abort);
  FAKE_NCCL_COUNT(*communicator, live_communicators, -1);
  FAKE_NCCL_COUNT(*communicator, live_reduce_ops, -communicator->live_reduce_ops());
  communicator->leave();
  return ncclSuccess;
}

}  // namespace

FAKE_API ncclResult_t ncclGetVersion(int* version) {
  *version = static_cast<int>(fake_option("FAKE_NCCL_VERSION", -1, kVersion));
  return ncclSuccess;
}

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

FAKE_API ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
  *out = make_world();
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank,
                                             ncclConfig_t* config) {
  if (config->magic != kNcclConfigMagic || config->size < sizeof(ncclConfig_t) ||
      config->blocking != 0) {
    return fail(ncclInvalidArgument, "the fake takes a configuration that does not block");
  }
  if (rank < 0 || rank >= size) {
    return fail(ncclInvalidArgument,
                "Invalid rank requested : " + std::to_string(rank) + "/" + std::to_string(size));
  }
  const auto communicator = std::make_shared<Communicator>(rank, size, fake_current_device());
  *out = communicators().add(communicator);
  FAKE_NCCL_COUNT(*communicator, live_communicators, 1);
  return progress(communicator, [communicator, id] { return join_late(*communicator, id); });
}

FAKE_API ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr) return no_communicator();
  return progress(communicator, [communicator] { return communicator->wait_until_flushed(); });
}

FAKE_API ncclResult_t ncclCommDestroy(ncclComm_t handle) { return end(handle, false); }

FAKE_API ncclResult_t ncclCommAbort(ncclComm_t handle) { return end(handle, true); }

FAKE_API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* out) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr) return no_communicator();
  *out = communicator->state();
  return ncclSuccess;
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

FAKE_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* out, void* scalar, ncclDataType_t dtype,
                                               int residence, ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr || (dtype != ncclFloat32 && dtype != ncclFloat64) ||
      residence != ncclScalarHostImmediate) {
    return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum : invalid argument");
  }
  *out = communicator->add_scale(dtype == ncclFloat64 ? *static_cast<double*>(scalar)
                                                      : *static_cast<float*>(scalar));
  return ncclSuccess;
}

FAKE_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (communicator == nullptr || !communicator->remove_scale(op)) {
    return fail(ncclInvalidArgument, "ncclRedOpDestroy : invalid reduction operation");
  }
  return ncclSuccess;
}
