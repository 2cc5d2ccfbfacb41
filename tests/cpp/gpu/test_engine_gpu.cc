// Whole engines on fake GPUs: planes, mismatches, faults.
#include <cmath>
#include <latch>

#include "gpu_engines.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

// Reduces a batch of GPU tensors and checks the result.
void check_sum(Engine& engine, Framework& gpu, std::size_t count = 1000) {
  const OnDevice tensor = gpu.tensor(std::vector<float>(count, 2.0F));
  CHECK_OK(gpu.run(engine, gpu.entry("sum", tensor, count)));
  CHECK_EQ(gpu.read(tensor.data(), count).back(), 2.0F * static_cast<float>(engine.size()));
}

std::vector<float> uneven(int seed, std::size_t count) {
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(std::sin(static_cast<float>(i * static_cast<std::size_t>(seed + 1) % 997)));
  }
  return values;
}

// Two ranks have an allreduce on their devices that waits for rank 1's producer, and rank 1 gives
// up: rank 0 gets the error soon, and its allreduce ends, too.
void check_that_a_lost_peer_ends_an_allreduce() {
  std::latch on_devices(2);
  GpuWorld{}.run([&](int rank, Engine& engine, Framework& gpu) {
    const OnDevice tensor = gpu.tensor(std::vector<float>(5000, 1.0F));
    CHECK_OK(gpu.run(engine, gpu.entry("first", tensor, 5000)));
    if (rank == 1) hold(gpu.producer, true);
    const EntryPtr stuck = gpu.entry("stuck", tensor, 5000);
    CHECK_OK(run(engine, stuck));
    on_devices.arrive_and_wait();
    const auto begin = std::chrono::steady_clock::now();
    if (rank == 1) {
      // Its own device goes on later: what NCCL has queued there ends only then.
      std::thread release([&] {
        std::this_thread::sleep_for(500ms);
        hold(gpu.producer, false);
      });
      engine.abort("rank 1 gives up");
      release.join();
      return;
    }
    CHECK(ends_soon(engine, 10s));
    CHECK(std::chrono::steady_clock::now() - begin < 3s);
    CHECK_STATUS(engine.status(), StatusCode::kRankFailed);
    CHECK(contains(engine.status(), "rank 1 gives up"));
    CHECK(soon([&] { return stuck->completion->on_device->reached(); }));
  });
}

}  // namespace

TEST(engine_gpu_host_and_device_tensors_of_one_operation_take_their_planes) {
  GpuWorld{{0, 0, 1}}.run([](int rank, Engine& engine, Framework& gpu) {
    const auto own = static_cast<float>(rank + 1);
    const OnDevice tensor = gpu.tensor(std::vector<float>(500, own));
    std::vector<float> host(7, own);
    EntryPtr entry = gpu.entry("mixed", tensor, 500);
    entry->request.tensors.push_back({"on the host", DataType::kFloat32, {7}});
    entry->inputs.push_back(host.data());
    entry->outputs.push_back(host.data());
    CHECK_OK(gpu.run(engine, entry));
    CHECK_EQ(host[6], 6.0F);
    CHECK_EQ(gpu.read(tensor.data(), 500)[499], 6.0F);
  });
}

TEST(engine_gpu_packs_a_batch_with_one_launch_each_way_and_never_waits) {
  GpuWorld{}.run([](int, Engine& engine, Framework& gpu) {
    check_sum(engine, gpu);  // opens everything
    std::vector<OnDevice> tensors;
    for (int i = 0; i < 5; ++i) tensors.push_back(gpu.tensor(std::vector<float>(100, 1.0F)));
    std::vector<float> none(1);
    CHECK_OK(run(engine, allreduce_entry("together", none)));
    const FakeCounters before = gpu_counters();
    const EntryPtr entry = grouped(gpu, tensors, 100);
    CHECK_OK(run(engine, entry));
    const FakeCounters after = gpu_counters();
    CHECK_OK(run(engine, allreduce_entry("together", none)));
    // The counts are those of both ranks, which run together, so at least those of this one.
    CHECK(after.kernel_launches - before.kernel_launches <= 4);
    CHECK(after.collective_launches - before.collective_launches <= 2);
    CHECK_EQ(after.host_syncs, before.host_syncs);
    CHECK_EQ(after.default_stream_work, 0);
    CHECK_OK(gpu.device->wait(gpu.consumer, *entry->completion->on_device));
    for (const OnDevice& tensor : tensors) CHECK_EQ(gpu.read(tensor.data(), 100)[99], 2.0F);
  });
}

TEST(engine_gpu_weighted_average_ignores_what_a_rank_of_weight_zero_has) {
  GpuWorld{{0, 0, 0}}.run([](int rank, Engine& engine, Framework& gpu) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const std::size_t tensors : {1, 3}) {
      std::vector<OnDevice> all;
      for (std::size_t i = 0; i < tensors; ++i) {
        all.push_back(gpu.tensor(std::vector<float>(64, rank == 1 ? nan : 3.0F + rank)));
      }
      EntryPtr entry = grouped(gpu, all, 64);
      entry->request.op = ReduceOp::kAverage;
      entry->request.weighted = true;
      entry->weight = rank == 1 ? 0.0 : 2.0;
      CHECK_OK(gpu.run(engine, entry));
      for (const OnDevice& tensor : all) CHECK_EQ(gpu.read(tensor.data(), 64)[63], 4.0F);
    }
  });
}

TEST(engine_gpu_names_what_it_refuses_and_the_world_goes_on) {
  GpuWorld{}.run([](int rank, Engine& engine, Framework& gpu) {
    const OnDevice tensor = gpu.tensor(std::vector<float>(4, 1.0F));
    std::vector<float> host(4);
    Status status = run(engine, rank == 0 ? allreduce_entry("x", host) : gpu.entry("x", tensor, 4));
    CHECK_STATUS(status, StatusCode::kMismatch);
    CHECK(contains(status, "allreduce 'x': ranks disagree about the device"));
    CHECK(contains(status, "rank 0 has host memory"));
    CHECK(contains(status, "rank 1 has a GPU"));

    CHECK(gpu_hook<decltype(fake_set_capturing)>("fake_set_capturing", gpu.producer, true));
    status = engine.enqueue(gpu.entry("x", tensor, 4), false);
    CHECK_STATUS(status, StatusCode::kInvalidArgument);
    CHECK(contains(status, "a CUDA graph is being captured"));
    CHECK(gpu_hook<decltype(fake_set_capturing)>("fake_set_capturing", gpu.producer, false));

    check_sum(engine, gpu);
    Framework other(rank + 2);
    const OnDevice elsewhere = other.tensor({1.0F});
    status = engine.enqueue(other.entry("x", elsewhere, 1), false);
    CHECK_STATUS(status, StatusCode::kInvalidArgument);
    CHECK(contains(status, "a process set has one device on each rank"));
    check_sum(engine, gpu);
  });
}

TEST(engine_gpu_reduces_over_those_that_have_not_joined) {
  GpuWorld world{{0, 0, 1}};
  world.config.require_nccl = 1;
  world.run([](int rank, Engine& engine, Framework& gpu) {
    const auto sum_of = [&](const char* name, std::size_t tensors) {
      std::vector<OnDevice> all;
      for (std::size_t i = 0; i < tensors; ++i) {
        all.push_back(gpu.tensor(std::vector<float>(64, static_cast<float>(rank + 1))));
      }
      EntryPtr entry = grouped(gpu, all, 64);
      entry->request.name = name;
      CHECK_OK(gpu.run(engine, entry));
      const float sum = gpu.read(all[0].data(), 64)[63];
      for (const OnDevice& tensor : all) CHECK_EQ(gpu.read(tensor.data(), 64)[0], sum);
      return sum;
    };
    for (int round = 0; round < 4; ++round) {
      // Rank `first` joins first, then the next one; in round 0 no rank has used NCCL before.
      const int first = round % 3;
      const int second = (first + 1) % 3;
      if (rank != first) CHECK_EQ(sum_of("of two", 3), static_cast<float>(6 - (first + 1)));
      if (rank != first) {  // also where NCCL is required: equal vectors are averaged
        const OnDevice same = gpu.tensor(std::vector<float>(700, 3.0F));
        CHECK_OK(gpu.run(engine, gpu.entry("adasum", same, 700, ReduceOp::kAdasum)));
        CHECK_EQ(gpu.read(same.data(), 700)[699], 3.0F);
      }
      if (rank != first && rank != second) {
        CHECK_EQ(sum_of("of one", 1), static_cast<float>(rank + 1));
      }
      CHECK_OK(run(engine, join_entry()));
      CHECK_EQ(sum_of("of all", 2), 6.0F);
      check_usable(engine);
    }
    CHECK(gpu_counters().live_communicators <= 3);
  });
}

TEST(engine_gpu_adasum_goes_through_the_host_and_has_its_bits) {
  constexpr std::size_t kCount = 6000;
  for (const char* nccl : {"libnccl.so.2", "nowhere"}) {
    GpuWorld world{{0, 0, 1}};
    world.libraries = {gpu_libraries(nccl)};
    world.run([](int rank, Engine& engine, Framework& gpu) {
      check_sum(engine, gpu);  // opens everything
      std::vector<std::vector<float>> given, host;
      std::vector<OnDevice> tensors;
      for (int t = 0; t < 3; ++t) {
        given.push_back(uneven(rank + t, kCount));
        tensors.push_back(gpu.tensor(std::vector<float>(kCount)));
      }
      host = given;
      const EntryPtr on_host = allreduce_entry("on the host", host[0], ReduceOp::kAdasum);
      for (std::size_t t = 1; t < host.size(); ++t) {
        on_host->request.tensors.push_back(on_host->request.tensors[0]);
        on_host->inputs.push_back(host[t].data());
        on_host->outputs.push_back(host[t].data());
      }
      CHECK_OK(run(engine, on_host));
      const FakeCounters before = gpu_counters();
      // The producer writes the values late.
      hold(gpu.producer, true);
      for (std::size_t t = 0; t < host.size(); ++t) {
        tensors[t].write(given[t].data(), kCount * sizeof(float));
      }
      std::thread release([&] {
        std::this_thread::sleep_for(50ms);
        hold(gpu.producer, false);
      });
      const EntryPtr entry = grouped(gpu, tensors, kCount);
      entry->request.op = ReduceOp::kAdasum;
      CHECK_OK(gpu.run(engine, entry));
      release.join();
      CHECK_EQ(gpu_counters().collective_launches, before.collective_launches);
      for (std::size_t t = 0; t < host.size(); ++t) {
        CHECK(gpu.read(tensors[t].data(), kCount) == host[t]);
      }
      check_sum(engine, gpu);
    });
  }
}

TEST(engine_gpu_a_removed_process_set_lets_go_of_its_communicator_and_device) {
  GpuWorld{{0, 0, 0}}.run([](int rank, Engine& engine, Framework& gpu) {
    Framework other(rank + 4);
    for (int i = 0; i < 3; ++i) {
      const std::uint32_t set = add_set(engine, {0, 2});
      if (rank != 1) {
        Framework& by = i == 1 ? other : gpu;  // a new process set may have another device
        const OnDevice tensor = by.tensor({3.0F});
        CHECK_OK(by.run(engine, in_set(by.entry("in the set", tensor, 1), set)));
        CHECK_EQ(by.read(tensor.data(), 1)[0], 6.0F);
      }
      CHECK_OK(run(engine, removal(set)));
    }
  });
}

TEST(engine_gpu_without_nccl_passes_through_the_host_or_fails_if_told) {
  GpuWorld world{{0, 0, 1}};
  world.libraries = {gpu_libraries(), gpu_libraries("nowhere"), gpu_libraries()};
  world.run([](int, Engine& engine, Framework& gpu) { check_sum(engine, gpu); });
  world.config.require_nccl = 1;
  world.run([](int, Engine& engine, Framework& gpu) {
    const OnDevice tensor = gpu.tensor({1.0F});
    const Status status = run(engine, gpu.entry("x", tensor, 1));
    CHECK_STATUS(status, StatusCode::kInvalidArgument);
    CHECK(contains(status, "allreduce 'x': NCCL cannot be used on rank 1"));
    CHECK(contains(status, "HVDLITE_REQUIRE_NCCL=1"));
    check_usable(engine);
  });
}

TEST(engine_gpu_names_a_clash_of_versions_on_every_rank) {
  set_gpu_option("FAKE_NCCL_VERSION", "21903");
  const auto older = gpu_libraries().nccl();
  set_gpu_option("FAKE_NCCL_VERSION", nullptr);
  GpuWorld world;
  world.libraries = {gpu_libraries(), {gpu_libraries().cuda, [&] { return older; }}};
  world.run([](int, Engine& engine, Framework& gpu) {
    const OnDevice tensor = gpu.tensor({1.0F});
    const Status status = run(engine, gpu.entry("x", tensor, 1));
    CHECK_STATUS(status, StatusCode::kInvalidArgument);
    CHECK(contains(status, "NCCL 2.28.7 on rank 0 and 2.19.3 on rank 1 do not work together"));
    check_usable(engine);
  });
}

TEST(engine_gpu_says_which_ranks_share_a_device) {
  GpuWorld world;
  world.share_device = true;
  world.run([](int, Engine& engine, Framework& gpu) {
    const OnDevice tensor = gpu.tensor({1.0F});
    const Status status = run(engine, gpu.entry("x", tensor, 1));
    CHECK(status.sticky());
    CHECK(contains(status, "Duplicate GPU detected"));
    CHECK(contains(status, "ranks 0 and 1 use the same GPU"));
    CHECK(contains(status, "NCCL_DEBUG=INFO"));
  });
}

TEST(engine_gpu_goes_unfused_where_one_rank_has_no_memory_for_the_buffer) {
  set_gpu_option("FAKE_FAIL_ncclMemAlloc", "1", 1);
  set_gpu_option("FAKE_CUDA_MEMORY", "200000", 1);
  GpuWorld{}.run([](int, Engine& engine, Framework& gpu) {
    std::vector<OnDevice> tensors;
    for (int i = 0; i < 3; ++i) tensors.push_back(gpu.tensor(std::vector<float>(100, 1.0F)));
    const EntryPtr entry = grouped(gpu, tensors, 100);
    entry->request.prescale = 0.5;
    entry->request.postscale = 4;
    CHECK_OK(gpu.run(engine, entry));
    for (const OnDevice& tensor : tensors) CHECK_EQ(gpu.read(tensor.data(), 100)[99], 4.0F);
  });
  set_gpu_option("FAKE_FAIL_ncclMemAlloc", nullptr, 1);
  set_gpu_option("FAKE_CUDA_MEMORY", nullptr, 1);
}

TEST(engine_gpu_no_memory_for_a_result_ends_the_world_and_says_where) {
  set_gpu_option("FAKE_CUDA_MEMORY", "1000000", 1);
  GpuWorld world;
  world.config.fusion_threshold = 0;
  world.run([](int, Engine& engine, Framework& gpu) {
    constexpr std::size_t kCount = 100'000;  // for which there is room, but not for two
    const OnDevice tensor = gpu.tensor(std::vector<float>(kCount, 1.0F));
    const EntryPtr entry = gpu.entry("rows", tensor, kCount);
    entry->request.kind = Kind::kAllgather;
    entry->outputs = {nullptr};
    const Status status = run(engine, entry);
    CHECK(ends_soon(engine, 20s));
    CHECK(engine.status().sticky());
    CHECK(contains(engine.status(), "allgather 'rows': no memory for the 800000 bytes"));
    CHECK(contains(engine.status(), "GPU 1: allocating 1048576 bytes: CUDA_ERROR_OUT_OF_MEMORY"));
    CHECK(contains(engine.status(), "bytes of its result on rank 1"));
    CHECK(status.ok() || status.sticky());
  });
  set_gpu_option("FAKE_CUDA_MEMORY", nullptr, 1);
}

TEST(engine_gpu_a_lost_peer_ends_work_that_is_stuck_on_the_device) {
  for (const char* silent : {"0", "1"}) {
    set_gpu_option("FAKE_NCCL_SILENT_PEERS", silent);
    check_that_a_lost_peer_ends_an_allreduce();
    set_gpu_option("FAKE_NCCL_SILENT_PEERS", nullptr);
  }
}

TEST(engine_gpu_an_error_of_nccl_carries_its_words) {
  set_gpu_option("FAKE_FAIL_ncclAsync", "3@1", 0);
  GpuWorld{}.run([](int, Engine& engine, Framework& gpu) {
    const OnDevice tensor = gpu.tensor({1.0F});
    const Status status = run(engine, gpu.entry("x", tensor, 1));
    CHECK(ends_soon(engine, 10s));
    CHECK(engine.status().sticky());
    CHECK(contains(engine.status(), "on rank 0, GPU 0"));
    CHECK(contains(engine.status(), "NCCL_DEBUG=INFO"));
    CHECK(status.ok() || status.sticky());
  });
  set_gpu_option("FAKE_FAIL_ncclAsync", nullptr, 0);
}

TEST(engine_gpu_too_old_a_driver_or_none_is_an_error_of_the_tensor) {
  GpuWorld world;
  world.libraries = {{[] { return CudaApi::load("/nowhere/libcuda.so.1"); }, gpu_libraries().nccl}};
  world.run([](int, Engine& engine, Framework& gpu) {
    const OnDevice tensor = gpu.tensor({1.0F});
    const Status status = engine.enqueue(gpu.entry("x", tensor, 1), false);
    CHECK_STATUS(status, StatusCode::kInvalidArgument);
    CHECK(contains(status, "there is no NVIDIA driver here"));
    check_usable(engine);
  });
  set_gpu_option("FAKE_CUDA_DRIVER_VERSION", "10020");
  const auto old = gpu_libraries().cuda();
  CHECK(contains(old.status(), "speaks CUDA 10.2, but 11.0 or newer is needed"));
  set_gpu_option("FAKE_CUDA_DRIVER_VERSION", "11040");
  world.libraries = {gpu_libraries()};
  world.run([](int, Engine& engine, Framework& gpu) {
    const OnDevice tensor = gpu.tensor({1.0F});
    const Status status = run(engine, gpu.entry("x", tensor, 1));
    CHECK(status.sticky());
    CHECK(contains(status, "CUDA driver version is insufficient"));
  });
  set_gpu_option("FAKE_CUDA_DRIVER_VERSION", nullptr);
}

TEST(engine_gpu_leaves_nothing_on_the_device_but_a_stream_for_the_next) {
  const auto run = [] {
    GpuWorld{{0, 0, 0}}.run([](int, Engine& engine, Framework& gpu) { check_sum(engine, gpu); });
  };
  run();
  const FakeCounters before = gpu_counters();
  run();
  const FakeCounters after = gpu_counters();
  CHECK_EQ(after.live_allocations, before.live_allocations);
  CHECK_EQ(after.live_streams, before.live_streams);
  CHECK_EQ(after.live_events, before.live_events);
  CHECK_EQ(after.live_modules, before.live_modules);
  CHECK_EQ(after.live_contexts, before.live_contexts);
  CHECK_EQ(after.live_communicators, before.live_communicators);
  CHECK_EQ(after.live_registrations, before.live_registrations);
}
