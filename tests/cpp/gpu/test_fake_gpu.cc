// The fakes themselves: what they promise to the tests that rest on them. Ranks are threads.
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/cuda_abi.h"
#include "fake_gpu.h"
#include "hooks.h"
#include "nccl/nccl_abi.h"

using namespace hvdlite::testing;

namespace {

// Functions by the name that a caller of the real library would ask for.
template <typename... Arguments>
int nccl(const char* name, Arguments... arguments) {
  return fake_function<int(Arguments...)>("libnccl.so.2", name)(arguments...);
}
template <typename Result, typename... Arguments>
Result hook(const char* name, Arguments... arguments) {
  return fake_function<Result(Arguments...)>("libcuda.so.1", name)(arguments...);
}
void set_option(const char* name, const char* value) {
  hook<void, const char*, int, const char*>("fake_set_option", name, -1, value);
}
FakeCounters counters() {
  FakeCounters now{};
  hook<void, int, FakeCounters*>("fake_counters", -1, &now);
  return now;
}

// A rank's device, stream and one buffer of floats.
struct Rank {
  explicit Rank(int device, std::size_t count = 4) : device(device), count(count) {
    CHECK_EQ(cuda("cuInit", 0u), CUDA_SUCCESS);
    CUcontext context = nullptr;
    CHECK_EQ(cuda("cuDevicePrimaryCtxRetain", &context, device), CUDA_SUCCESS);
    CHECK_EQ(cuda("cuCtxSetCurrent", context), CUDA_SUCCESS);
    CHECK_EQ(cuda("cuStreamCreate", &stream, 1u), CUDA_SUCCESS);
    CHECK_EQ(cuda("cuMemAlloc_v2", &buffer, count * sizeof(float)), CUDA_SUCCESS);
  }
  ~Rank() {
    CHECK_EQ(cuda("cuMemFree_v2", buffer), CUDA_SUCCESS);
    CHECK_EQ(cuda("cuStreamDestroy_v2", stream), CUDA_SUCCESS);
    CHECK_EQ(cuda("cuDevicePrimaryCtxRelease_v2", device), CUDA_SUCCESS);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  void fill(float value) {
    const std::vector<float> host(count, value);
    CHECK(hook<bool, std::uint64_t, const void*, std::size_t>("fake_write", buffer, host.data(),
                                                              count * sizeof(float)));
  }
  std::vector<float> read() const {
    std::vector<float> host(count);
    CHECK(hook<bool, std::uint64_t, void*, std::size_t>("fake_read", buffer, host.data(),
                                                        count * sizeof(float)));
    return host;
  }
  int allreduce(ncclComm_t comm, ncclRedOp_t op = ncclSum) const {
    void* address = reinterpret_cast<void*>(buffer);
    return nccl("ncclAllReduce", static_cast<const void*>(address), address, count,
                static_cast<int>(ncclFloat32), op, comm, stream);
  }
  void synchronize() const { CHECK_EQ(cuda("cuStreamSynchronize", stream), CUDA_SUCCESS); }

  int device;
  std::size_t count;
  CUstream stream = nullptr;
  CUdeviceptr buffer = 0;
};

// Runs `body(rank, communicator)` on a thread for each rank; `config` as for every rank.
void on_ranks(int size, const ncclConfig_t* config,
              const std::function<void(Rank&, ncclComm_t)>& body, std::size_t count = 4) {
  set_option("FAKE_NCCL_TIMEOUT_MS", "20000");
  ncclUniqueId id{};
  CHECK_EQ(nccl("ncclGetUniqueId", &id), ncclSuccess);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(r, count);
      ncclComm_t comm = nullptr;
      ncclConfig_t own = config != nullptr ? *config : ncclConfig_t{};
      const int result =
          nccl("ncclCommInitRankConfig", &comm, size, id, r, config != nullptr ? &own : nullptr);
      CHECK_EQ(result, config != nullptr ? ncclInProgress : ncclSuccess);
      body(rank, comm);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

int async_error(ncclComm_t comm) {
  ncclResult_t state = ncclSuccess;
  CHECK_EQ(nccl("ncclCommGetAsyncError", comm, &state), ncclSuccess);
  return state;
}
int settled(ncclComm_t comm) {
  while (async_error(comm) == ncclInProgress) std::this_thread::yield();
  return async_error(comm);
}
std::string last_error() {
  return fake_function<const char*(ncclComm_t)>("libnccl.so.2", "ncclGetLastError")(nullptr);
}

void expect_nothing_left(const FakeCounters& before) {
  const FakeCounters now = counters();
  CHECK_EQ(now.live_allocations, before.live_allocations);
  CHECK_EQ(now.live_bytes, before.live_bytes);
  CHECK_EQ(now.live_streams, before.live_streams);
  CHECK_EQ(now.live_events, before.live_events);
  CHECK_EQ(now.live_contexts, before.live_contexts);
  CHECK_EQ(now.live_communicators, before.live_communicators);
  CHECK_EQ(now.live_registrations, before.live_registrations);
}

}  // namespace

TEST(fake_gpu_reduces_over_threads_and_leaves_nothing) {
  const FakeCounters before = counters();
  on_ranks(
      3, nullptr,
      [](Rank& rank, ncclComm_t comm) {
        rank.fill(static_cast<float>(rank.device + 1));
        CHECK_EQ(rank.allreduce(comm), ncclSuccess);
        rank.synchronize();
        CHECK_EQ(rank.read().back(), 6.0f);
        CHECK_EQ(nccl("ncclCommDestroy", comm), ncclSuccess);
      },
      200000);
  expect_nothing_left(before);
  CHECK_EQ(counters().collective_launches, before.collective_launches + 3);
  CHECK_EQ(counters().default_stream_work, before.default_stream_work);
}

TEST(fake_gpu_faults_where_the_host_touches_device_memory) {
  Rank rank(0);
  const pid_t child = ::fork();
  if (child == 0) {
    volatile float* address = reinterpret_cast<float*>(rank.buffer);
    *address = 1.0f;
    ::_exit(0);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(!(WIFEXITED(status) && WEXITSTATUS(status) == 0));
}

TEST(fake_gpu_shows_a_missing_stream_wait_every_time) {
  Rank rank(0);
  CUstream consumer = nullptr;
  CUevent event = nullptr;
  CHECK_EQ(cuda("cuStreamCreate", &consumer, 1u), CUDA_SUCCESS);
  CHECK_EQ(cuda("cuEventCreate", &event, unsigned{CU_EVENT_DISABLE_TIMING}), CUDA_SUCCESS);
  for (const bool waits : {false, true}) {
    rank.fill(1.0f);
    std::vector<float> copied(rank.count);
    CHECK(hook<bool, void*, bool>("fake_hold_stream", rank.stream, true));
    CHECK_EQ(cuda("cuMemsetD8Async", rank.buffer, static_cast<unsigned char>(0),
                  rank.count * sizeof(float), rank.stream),
             CUDA_SUCCESS);
    CHECK_EQ(cuda("cuEventRecord", event, rank.stream), CUDA_SUCCESS);
    if (waits) CHECK_EQ(cuda("cuStreamWaitEvent", consumer, event, 0u), CUDA_SUCCESS);
    CHECK_EQ(cuda("cuMemcpyDtoHAsync_v2", static_cast<void*>(copied.data()), rank.buffer,
                  rank.count * sizeof(float), consumer),
             CUDA_SUCCESS);
    if (waits) {
      CHECK_EQ(cuda("cuStreamQuery", consumer), CUDA_ERROR_NOT_READY);
      CHECK(hook<bool, void*, bool>("fake_hold_stream", rank.stream, false));
    }
    CHECK_EQ(cuda("cuStreamSynchronize", consumer), CUDA_SUCCESS);
    CHECK_EQ(copied[0], waits ? 0.0f : 1.0f);
    CHECK(hook<bool, void*, bool>("fake_hold_stream", rank.stream, false));
    rank.synchronize();
  }
  CHECK_EQ(cuda("cuEventDestroy_v2", event), CUDA_SUCCESS);
  CHECK_EQ(cuda("cuStreamDestroy_v2", consumer), CUDA_SUCCESS);
}

TEST(fake_gpu_reports_a_mismatch_with_both_descriptions) {
  on_ranks(2, nullptr, [](Rank& rank, ncclComm_t comm) {
    CHECK_EQ(rank.allreduce(comm, rank.device == 0 ? ncclSum : ncclMax), ncclSuccess);
    rank.synchronize();
    CHECK_EQ(async_error(comm), ncclInvalidUsage);
    CHECK(last_error().find("AllReduce number 1 of 4 float32, sum") != std::string::npos);
    CHECK(last_error().find("AllReduce number 1 of 4 float32, max") != std::string::npos);
    CHECK_EQ(nccl("ncclCommAbort", comm), ncclSuccess);
  });
}

TEST(fake_gpu_abort_frees_a_stream_that_waits_for_a_lost_peer) {
  const FakeCounters before = counters();
  on_ranks(2, nullptr, [](Rank& rank, ncclComm_t comm) {
    if (rank.device == 1) {
      CHECK_EQ(nccl("ncclCommAbort", comm), ncclSuccess);
      return;
    }
    CHECK_EQ(rank.allreduce(comm), ncclSuccess);
    while (async_error(comm) == ncclSuccess) std::this_thread::yield();
    CHECK_EQ(async_error(comm), ncclRemoteError);
    CHECK_EQ(cuda("cuStreamQuery", rank.stream), CUDA_ERROR_NOT_READY);
    CHECK_EQ(nccl("ncclCommAbort", comm), ncclSuccess);
    rank.synchronize();
  });
  expect_nothing_left(before);
}

TEST(fake_gpu_non_blocking_calls_end_later) {
  const ncclConfig_t config{sizeof(ncclConfig_t), kNcclConfigMagic, 22807, 0};
  on_ranks(2, &config, [](Rank& rank, ncclComm_t comm) {
    CHECK_EQ(settled(comm), ncclSuccess);
    rank.fill(1.0f);
    CHECK_EQ(rank.allreduce(comm), ncclInProgress);
    CHECK_EQ(settled(comm), ncclSuccess);
    CHECK_EQ(rank.allreduce(comm), ncclSuccess);
    rank.synchronize();
    CHECK_EQ(rank.read()[0], 4.0f);
    CHECK_EQ(nccl("ncclCommDestroy", comm), ncclSuccess);
  });
}

TEST(fake_gpu_refuses_two_ranks_on_one_device) {
  ncclUniqueId id{};
  CHECK_EQ(nccl("ncclGetUniqueId", &id), ncclSuccess);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(0);
      ncclComm_t comm = nullptr;
      CHECK_EQ(nccl("ncclCommInitRank", &comm, 2, id, r), ncclInvalidUsage);
      CHECK(last_error().find("Duplicate GPU detected") != std::string::npos);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(fake_gpu_splits_and_exchanges_messages) {
  on_ranks(
      4, nullptr,
      [](Rank& rank, ncclComm_t comm) {
        ncclComm_t half = nullptr;
        CHECK_EQ(nccl("ncclCommSplit", comm, rank.device % 2, -rank.device, &half,
                      static_cast<ncclConfig_t*>(nullptr)),
                 ncclSuccess);
        int position = -1;
        CHECK_EQ(nccl("ncclCommUserRank", half, &position), ncclSuccess);
        CHECK_EQ(position, rank.device < 2 ? 1 : 0);
        const int peer = 1 - position;
        rank.fill(static_cast<float>(rank.device));
        const std::size_t count = rank.count / 2;
        void* upper = reinterpret_cast<void*>(rank.buffer + count * sizeof(float));
        const void* lower = reinterpret_cast<const void*>(rank.buffer);
        nccl("ncclGroupStart");
        CHECK_EQ(
            nccl("ncclSend", lower, count, static_cast<int>(ncclFloat32), peer, half, rank.stream),
            ncclSuccess);
        CHECK_EQ(
            nccl("ncclRecv", upper, count, static_cast<int>(ncclFloat32), peer, half, rank.stream),
            ncclSuccess);
        CHECK_EQ(nccl("ncclGroupEnd"), ncclSuccess);
        rank.synchronize();
        CHECK_EQ(rank.read().back(), static_cast<float>((rank.device + 2) % 4));
        CHECK_EQ(nccl("ncclCommDestroy", half), ncclSuccess);
        CHECK_EQ(nccl("ncclCommDestroy", comm), ncclSuccess);
      },
      100000);
}

TEST(fake_gpu_runs_out_of_memory_and_fails_when_told) {
  Rank rank(0);
  set_option("FAKE_CUDA_MEMORY", "1000");
  CUdeviceptr more = 0;
  CHECK_EQ(cuda("cuMemAlloc_v2", &more, std::size_t{1000}), CUDA_ERROR_OUT_OF_MEMORY);
  set_option("FAKE_CUDA_MEMORY", nullptr);
  set_option("FAKE_FAIL_cuMemAlloc_v2", "719@2");
  CHECK_EQ(cuda("cuMemAlloc_v2", &more, std::size_t{1000}), CUDA_SUCCESS);
  CHECK_EQ(cuda("cuMemFree_v2", more), CUDA_SUCCESS);
  CHECK_EQ(cuda("cuMemAlloc_v2", &more, std::size_t{1000}), CUDA_ERROR_LAUNCH_FAILED);
  set_option("FAKE_FAIL_cuMemAlloc_v2", nullptr);
}
