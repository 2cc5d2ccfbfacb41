// Adaptive summation of GPU tensors over NCCL, on the doubles: the kernels, their scratch, and
// whole engines. That results are what the formula says: test_adasum.cc, in every world.
#include <cmath>
#include <cstring>

#include "cpp/host/plain_adasum.h"
#include "gpu/adasum_layout.h"
#include "gpu/device_workspace.h"
#include "gpu_engines.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

constexpr const char* kPtx[] = {
#include "cuda/kernels/adasum_ptx.inc"
};

float part_of_rank(int rank, std::size_t i) {
  return std::sin(static_cast<float>(i * static_cast<std::size_t>(rank + 1) % 997));
}

std::vector<float> values_of(int rank, std::size_t count) {
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(part_of_rank(rank, i));
  return values;
}

// Of these ranks; within what float32 rounds off.
void check_adasum(const std::vector<float>& got, const std::vector<int>& ranks) {
  std::vector<Vector> vectors;
  for (const int rank : ranks) {
    const std::vector<float> values = values_of(rank, got.size());
    vectors.emplace_back(values.begin(), values.end());
  }
  const Vector wanted = plain_adasum(vectors);
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    worst = std::max(worst, std::abs(got[i] - wanted[i]));
  }
  CHECK(worst < 1e-5);
}

std::vector<float> adasum_of(Engine& engine, Framework& gpu, const std::vector<float>& values) {
  const OnDevice tensor = gpu.tensor(values);
  CHECK_OK(gpu.run(engine, gpu.entry("adasum", tensor, values.size(), ReduceOp::kAdasum)));
  return gpu.read(tensor.data(), values.size());
}

EntryPtr adasum_entry(Framework& gpu, const std::vector<OnDevice>& tensors, std::size_t count) {
  EntryPtr entry = grouped(gpu, tensors, count);
  entry->request.op = ReduceOp::kAdasum;
  return entry;
}

// One device with the kernels, and three tensors of two pairs of vectors.
struct Level {
  static constexpr std::size_t kStride = 20'000;
  std::unique_ptr<DeviceWorkspace> workspace =
      OnDevice::must(DeviceWorkspace::open(OnDevice::must(gpu_libraries().cuda()), 0));
  OnDevice vectors{*workspace->device, workspace->device->stream(), 4 * kStride * sizeof(double)};
  OnDevice partials{*workspace->device, workspace->device->stream(), 4096};
  OnDevice dots{*workspace->device, workspace->device->stream(), 8 * 3 * sizeof(double)};
  std::vector<AdasumSegment> segments = {{0, 9000, 0}, {9000, 1, 2}, {9008, 10'001, 3}};
  AdasumArgs args{};

  Level() {
    CHECK_OK(workspace->reserve_adasum(0));
    args.vectors = device_address(vectors.data());
    args.stride = kStride;
    args.partials = device_address(partials.data());
    args.dots = device_address(dots.data());
    args.tensors = 4;
    args.pairs = 2;
    for (const AdasumSegment& segment : segments) CHECK(add(args, segment));
  }
  // Runs the level with so many blocks; the vectors are what is left in them.
  std::vector<double> run(unsigned blocks) {
    std::vector<double> values(4 * kStride);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = value(i);
    vectors.write(values.data(), values.size() * sizeof(double));
    const std::vector<double> marks(24, -7.0);
    dots.write(marks.data(), marks.size() * sizeof(double));
    for (const char* name : {"dots_f64", "sum", "combine_f64"}) {
      CHECK_OK(workspace->adasum->launch(std::string("hvdlite_adasum_") + name, blocks, &args));
    }
    vectors.read(values.data(), values.size() * sizeof(double));
    return values;
  }
  static double value(std::size_t i) { return std::sin(static_cast<double>(i * i % 1013)); }
};

}  // namespace

TEST(adasum_kernels_give_what_the_formula_says_with_any_grid) {
  Level level;
  const std::vector<double> one_block = level.run(1);
  for (const AdasumSegment& segment : level.segments) {
    for (std::size_t pair = 0; pair < 2; ++pair) {
      Vector a, b;
      const std::size_t begin = 2 * pair * Level::kStride + segment.begin;
      for (std::size_t i = begin; i < begin + segment.count; ++i) {
        a.push_back(Level::value(i));
        b.push_back(Level::value(i + Level::kStride));
      }
      std::vector<double> dots(24);
      level.dots.read(dots.data(), dots.size() * sizeof(double));
      const double* found = dots.data() + 3 * (pair * 4 + segment.tensor);
      CHECK(std::abs(found[0] - dot(a, a)) < 1e-9 * dot(a, a));
      CHECK(std::abs(found[1] - dot(b, b)) < 1e-9 * dot(b, b));
      CHECK(std::abs(found[2] - dot(a, b)) < 1e-9 * dot(a, a));
      CHECK_EQ(dots[3 * (pair * 4 + 1)], -7.0);  // a tensor that has no segment here
      const Vector wanted = plain_adasum(a, b);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        CHECK(std::abs(one_block[begin + i] - wanted[i]) < 1e-12);
      }
    }
  }
  for (std::size_t i = 9001; i < 9008; ++i) CHECK_EQ(one_block[i], Level::value(i));
  for (const unsigned blocks : {2u, 3u, 64u}) CHECK(level.run(blocks) == one_block);
}

TEST(adasum_ptx_declares_the_kernels_of_the_header_and_their_parameter) {
  std::string ptx;
  for (const char* piece : kPtx) ptx += piece;
  std::size_t entries = 0;
  for (std::size_t at = 0; (at = ptx.find(".visible .entry ", at)) != ptx.npos; ++at) ++entries;
#define NAME_TYPED(name, type) "hvdlite_adasum_" #name "_" #type,
#define NAME_PLAIN(name) "hvdlite_adasum_" #name,
  const std::vector<std::string> names = {HVDLITE_ADASUM_KERNELS(NAME_TYPED, NAME_PLAIN)};
#undef NAME_TYPED
#undef NAME_PLAIN
  CHECK_EQ(entries, names.size());
  for (const std::string& name : names) {
    const std::string parameter = name + "_param_0[" + std::to_string(sizeof(AdasumArgs)) + "]\n)";
    CHECK(ptx.find(".visible .entry " + name + "(") != ptx.npos);
    CHECK(ptx.find(parameter) != ptx.npos);
  }
}

TEST(adasum_takes_tables_of_many_tensors) {
  AdasumArgs args{};
  for (unsigned i = 0; i < kMaxAdasumSegments; ++i) CHECK(add(args, {i, 1, i}));
  CHECK(!add(args, {kMaxAdasumSegments, 1, kMaxAdasumSegments}));
  CHECK_EQ(args.first_tile[args.count], kMaxAdasumSegments);
}

TEST(adasum_layout_keeps_tensors_whole_and_its_regions_apart) {
  const std::vector<std::uint64_t> counts = {5, 0, 1, 5000, 17, 3, 0, 900};
  for (const std::uint64_t bytes : {2, 4, 8}) {
    for (const std::uint64_t members : {2, 3, 8}) {
      for (const std::uint64_t room : {0, 4096, 1 << 20}) {
        std::size_t next = 0;
        for (const AdasumRound& round : lay_out_adasum(counts, bytes, members, room)) {
          CHECK_EQ(round.first, next);
          CHECK(round.bytes <= room || round.counts.size() == 1);
          std::uint64_t end = 0;
          for (std::size_t i = 0; i < round.counts.size(); ++i, ++next) {
            CHECK_EQ(round.counts[i], counts[next]);
            CHECK_EQ(round.begins[i] * bytes % 16, 0u);
            CHECK(round.begins[i] >= end || round.counts[i] == 0);
            if (round.counts[i] > 0) end = round.begins[i] + round.counts[i];
          }
          CHECK_EQ(end, round.elements);
          CHECK(round.elements * bytes <= round.received);
          std::uint64_t largest = 0;
          for (std::uint64_t i = 0; i < members; ++i) {
            largest = std::max(largest, part_of({0, end}, bytes, members, i).count());
          }
          CHECK(bytes > 2 || members * largest * sizeof(float) <= round.received);
          CHECK(members * largest * bytes <= round.partials - round.received);
          const std::uint64_t tiles = tiles_of(largest) + round.counts.size();
          CHECK(members / 2 * tiles * 24 <= round.dots - round.partials);
          CHECK_EQ(round.dots % sizeof(double), 0u);
          CHECK_EQ(round.bytes - round.dots, members / 2 * round.counts.size() * 24);
        }
        CHECK_EQ(next, counts.size());
      }
    }
  }
}

TEST(engine_gpu_adasum_over_nccl_waits_for_nothing_on_the_host) {
  GpuWorld world{{0, 0, 1}};
  world.config.require_nccl = 1;
  world.run([](int rank, Engine& engine, Framework& gpu) {
    constexpr std::size_t kCount = 6000;
    check_adasum(adasum_of(engine, gpu, values_of(rank, kCount)), {0, 1, 2});
    std::vector<OnDevice> tensors;
    for (int i = 0; i < 3; ++i) tensors.push_back(gpu.tensor(values_of(rank, kCount)));
    std::vector<float> none(1);
    CHECK_OK(run(engine, allreduce_entry("together", none)));
    const FakeCounters before = gpu_counters();
    hold(gpu.producer, true);  // nothing can run on any device
    const EntryPtr entry = adasum_entry(gpu, tensors, kCount);
    CHECK_OK(run(engine, entry));
    const FakeCounters after = gpu_counters();
    CHECK(!entry->completion->on_device->reached());
    CHECK_OK(run(engine, allreduce_entry("together", none)));
    hold(gpu.producer, false);
    CHECK_EQ(after.host_syncs, before.host_syncs);
    CHECK_EQ(after.default_stream_work, 0);
    // Of three ranks: pack, unpack, and for each of two levels dots, sum and combine.
    CHECK(after.kernel_launches - before.kernel_launches <= 3 * 8);
    // An alltoall, an allgather, and an allreduce for each level.
    CHECK(after.collective_launches - before.collective_launches <= 3 * 4);
    CHECK_OK(gpu.device->wait(gpu.consumer, *entry->completion->on_device));
    const std::vector<float> first = gpu.read(tensors[0].data(), kCount);
    check_adasum(first, {0, 1, 2});
    const std::vector<float> last = gpu.read(tensors[2].data(), kCount);
    check_adasum(last, {0, 1, 2});
  });
}

TEST(engine_gpu_adasum_has_the_same_bits_on_every_rank_and_in_every_run) {
  GpuWorld world{{0, 0, 0, 0}};
  world.config.fusion_threshold = 32768;  // two rounds
  world.run([](int rank, Engine& engine, Framework& gpu) {
    constexpr std::size_t kCount = 2500;
    std::vector<std::byte> first;
    for (int i = 0; i < 3; ++i) {
      std::vector<OnDevice> tensors;
      for (int t = 0; t < 2; ++t) tensors.push_back(gpu.tensor(values_of(rank + t, kCount)));
      CHECK_OK(gpu.run(engine, adasum_entry(gpu, tensors, kCount)));
      const std::vector<float> results = gpu.read(tensors[1].data(), kCount);
      check_adasum(results, {1, 2, 3, 4});
      const auto bytes = std::as_bytes(std::span(results));
      if (first.empty()) first.assign(bytes.begin(), bytes.end());
      CHECK(std::equal(bytes.begin(), bytes.end(), first.begin(), first.end()));
      std::vector<float> host = results;
      EntryPtr least = allreduce_entry("least", host, ReduceOp::kMin);
      CHECK_OK(run(engine, least));
      CHECK(host == results);  // so every rank has the least, which is its own
    }
  });
}

TEST(engine_gpu_adasum_over_those_that_have_not_joined) {
  GpuWorld world{{0, 0, 1}};
  world.config.require_nccl = 1;
  world.run([](int rank, Engine& engine, Framework& gpu) {
    constexpr std::size_t kCount = 700;
    const std::vector<float> own = values_of(rank, kCount);
    for (int round = 0; round < 2; ++round) {
      if (rank != 1) check_adasum(adasum_of(engine, gpu, own), {0, 2});
      if (rank == 2) CHECK(adasum_of(engine, gpu, own) == own);
      CHECK_OK(run(engine, change_entry(Kind::kJoin, std::string(kJoinName))));
      check_adasum(adasum_of(engine, gpu, own), {0, 1, 2});
      check_usable(engine);
    }
  });
}

TEST(engine_gpu_adasum_of_more_tensors_than_a_table_holds) {
  GpuWorld{}.run([](int rank, Engine& engine, Framework& gpu) {
    constexpr std::size_t kCount = 5;
    std::vector<OnDevice> tensors;
    for (int t = 0; t < 400; ++t) tensors.push_back(gpu.tensor(values_of(rank + t, kCount)));
    CHECK_OK(gpu.run(engine, adasum_entry(gpu, tensors, kCount)));
    for (int t = 0; t < 400; ++t) {
      check_adasum(gpu.read(tensors[static_cast<std::size_t>(t)].data(), kCount), {t, t + 1});
    }
  });
}

TEST(engine_gpu_adasum_goes_tensor_by_tensor_where_one_rank_has_no_fusion_buffer) {
  set_gpu_option("FAKE_FAIL_ncclMemAlloc", "1", 1);
  set_gpu_option("FAKE_CUDA_MEMORY", "200000", 1);
  GpuWorld{}.run([](int rank, Engine& engine, Framework& gpu) {
    std::vector<OnDevice> tensors;
    for (int t = 0; t < 3; ++t) tensors.push_back(gpu.tensor(values_of(rank + t, 100)));
    CHECK_OK(gpu.run(engine, adasum_entry(gpu, tensors, 100)));
    for (int t = 0; t < 3; ++t) {
      check_adasum(gpu.read(tensors[static_cast<std::size_t>(t)].data(), 100), {t, t + 1});
    }
  });
  set_gpu_option("FAKE_FAIL_ncclMemAlloc", nullptr, 1);
  set_gpu_option("FAKE_CUDA_MEMORY", nullptr, 1);
}

TEST(engine_gpu_adasum_that_one_rank_has_no_memory_for_is_an_error_on_all) {
  set_gpu_option("FAKE_CUDA_MEMORY", "1500000", 1);
  GpuWorld world{{0, 0, 0}};
  world.config.fusion_threshold = 4096;
  world.run([](int rank, Engine& engine, Framework& gpu) {
    const std::vector<float> small = values_of(rank, 10'000);
    check_adasum(adasum_of(engine, gpu, small), {0, 1, 2});
    const std::vector<float> large = values_of(rank, 200'000);
    for (int i = 0; i < 2; ++i) {
      const OnDevice tensor = gpu.tensor(large);
      const EntryPtr entry = gpu.entry("large", tensor, large.size(), ReduceOp::kAdasum);
      const Status status = gpu.run(engine, entry);
      CHECK_STATUS(status, StatusCode::kOutOfMemory);
      CHECK(contains(status, "allreduce 'large': no memory for Adasum on rank 1 (GPU 1: "));
      CHECK(contains(status, "CUDA_ERROR_OUT_OF_MEMORY"));
      CHECK(contains(status, "send smaller tensors"));
      CHECK_EQ(status.failed_rank(), 1);
      CHECK(gpu.read(tensor.data(), large.size()) == large);
    }
    check_adasum(adasum_of(engine, gpu, small), {0, 1, 2});
    check_usable(engine);
  });
  set_gpu_option("FAKE_CUDA_MEMORY", nullptr, 1);
}

TEST(engine_gpu_adasum_without_nccl_has_the_bits_of_the_host) {
  GpuWorld world{{0, 0, 1}};
  world.libraries = {gpu_libraries("nowhere")};
  world.run([](int rank, Engine& engine, Framework& gpu) {
    std::vector<float> values = values_of(rank, 300);
    const std::vector<float> got = adasum_of(engine, gpu, values);
    CHECK_OK(run(engine, allreduce_entry("on the host", values, ReduceOp::kAdasum)));
    CHECK(got == values);
  });
}

TEST(engine_gpu_adasum_of_a_lost_peer_ends) {
  check_that_a_lost_peer_ends_an_allreduce(ReduceOp::kAdasum);
}
