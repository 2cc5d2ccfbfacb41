// HVDLITE_CHECK_FINITE: the rank that gives infinities or NaN, and no other, finds and names them.
#include <unistd.h>

#include <cmath>

#include "base/log.h"
#include "check.h"
#include "cpp/gpu/gpu_engines.h"
#include "cpp/host/backend_worlds.h"
#include "execution/finite_check.h"
#include "kernels/finite.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

constexpr DataType kFloats[] = {DataType::kFloat16, DataType::kBfloat16, DataType::kFloat32,
                                DataType::kFloat64};

std::uint64_t found_by(Engine& engine) { return engine.counters().nonfinite.get(); }

// Runs an all-reduce of the tensors, and a second one, at whose end the device has ended the first.
void run_both(Engine& engine, Framework& gpu, const EntryPtr& entry) {
  CHECK_OK(gpu.run(engine, entry));
  for (const void* output : entry->outputs) (void)gpu.read(output, 1);
  std::vector<float> none(1);
  CHECK_OK(run(engine, allreduce_entry("behind", none)));
}

// The engine reads the kernels' findings between collectives, at the latest after a few.
void expect_found(Engine& engine, std::uint64_t expected) {
  soon([&] { return found_by(engine) >= expected; }, std::chrono::seconds(2));
  CHECK_EQ(found_by(engine), expected);
}

// Rank 1 gives an infinity at element 70, the others give finite numbers. Counts the findings of
// each rank.
void check_gpu_forms(Engine& engine, Framework& gpu, int rank) {
  std::uint64_t expected = 0;
  for (const std::size_t tensors : {1, 3}) {
    for (const DataType wire : {DataType::kFloat32, DataType::kFloat16}) {
      for (const bool in_place : {true, false}) {
        std::vector<OnDevice> inputs, outputs;
        EntryPtr entry;
        for (std::size_t i = 0; i < tensors; ++i) {
          std::vector<float> values(100, 1.0F);
          if (rank == 1 && i == tensors - 1)
            values[70] = wire == DataType::kFloat32 ? INFINITY : 1e6F;
          inputs.push_back(gpu.tensor(values));
          outputs.push_back(gpu.tensor(std::vector<float>(100)));
          EntryPtr one = gpu.entry("g" + std::to_string(tensors), inputs.back(), 100);
          one->request.tensors[0].wire = wire;
          if (!in_place) one->outputs = {outputs.back().data()};
          if (i == 0) {
            entry = one;
            continue;
          }
          entry->request.tensors.push_back(one->request.tensors[0]);
          entry->inputs.push_back(one->inputs[0]);
          entry->outputs.push_back(one->outputs[0]);
        }
        run_both(engine, gpu, entry);
        const std::vector<float> result = gpu.read(entry->outputs.back(), 100);
        CHECK(std::isinf(result[70]));
        CHECK_EQ(result[69], static_cast<float>(engine.size()));
        expected += rank == 1 ? 1 : 0;
        expect_found(engine, expected);
      }
    }
  }
}

}  // namespace

TEST(finite_check_finds_the_first_element_of_every_type) {
  for (const DataType type : kFloats) {
    for (const std::size_t bad : {std::size_t{0}, std::size_t{1500}, std::size_t{2999}}) {
      for (const double value : {HUGE_VAL, -HUGE_VAL, std::nan("")}) {
        const auto tensor = make_tensor(type, 3000, [&](std::size_t i) {
          return i == bad || i == 2999 ? value : static_cast<double>(i) - 1500;
        });
        CHECK_EQ(first_nonfinite(type, tensor.data(), 3000, 1.0), bad);
        CHECK_EQ(first_nonfinite(type, tensor.data(), bad, 1.0), bad);
      }
    }
  }
  // The values that travel count, after scaling and casting.
  const std::vector<float> large = {1.0F, 70000.0F};
  const ElementTypes narrow{DataType::kFloat32, DataType::kFloat16};
  CHECK_EQ(first_nonfinite(narrow, large.data(), 2, 1.0), std::size_t{1});
  CHECK_EQ(first_nonfinite(narrow, large.data(), 2, 0.5), std::size_t{2});
  CHECK_EQ(first_nonfinite(DataType::kFloat32, large.data(), 2, 1e36), std::size_t{1});
}

TEST(finite_check_names_rank_tensor_and_element_once_in_a_while) {
  int ends[2];
  CHECK_EQ(::pipe(ends), 0);
  const int stderr_before = ::dup(STDERR_FILENO);
  Counter count;
  Events events;
  {
    set_log_level(LogLevel::kWarning);
    ::dup2(ends[1], STDERR_FILENO);
    FiniteCheck check(3, true, count, events);
    const std::vector<float> good(4);
    std::vector<float> bad(4);
    bad[2] = NAN;
    check.look("fine", DataType::kFloat32, {good.data(), nullptr, 4});
    check.report();
    check.look("layer.weight", DataType::kFloat32, {bad.data(), nullptr, 4});
    check.report();
    check.look("again", DataType::kFloat32, {bad.data(), nullptr, 4});
    check.report();  // too soon
    ::dup2(stderr_before, STDERR_FILENO);
  }
  ::close(ends[1]);
  ::close(stderr_before);
  char text[1000] = {};
  CHECK(::read(ends[0], text, sizeof(text) - 1) > 0);
  ::close(ends[0]);
  CHECK_EQ(std::string(text),
           std::string("hvdlite [3] warning: rank 3 gives infinities or NaN to a reduction: "
                       "'layer.weight' (first at element 2)\n"));
  CHECK_EQ(count.get(), std::uint64_t{2});
  const std::vector<Event> told = events.take();
  CHECK_EQ(told.size(), std::size_t{1});
  CHECK_EQ(told[0].kind, std::string("nonfinite"));
  CHECK_EQ(told[0].rank, 3);
  CHECK_EQ(told[0].name, std::string("layer.weight"));
}

TEST(finite_check_on_the_host_blames_who_gives_them) {
  Config config = quick_config();
  for (const bool on : {true, false}) {
    config.check_finite = on ? 1 : 0;
    run_world(
        {0, 0, 1},
        [&](int rank, Engine& engine) {
          for (const std::size_t count : {10, 50000}) {
            std::vector<float> values(count, rank == 2 ? INFINITY : 1.0F);
            CHECK_OK(run(engine, allreduce_entry("x", values)));
            CHECK(std::isinf(values.back()));
          }
          // A rank of weight 0 gives nothing, whatever it holds.
          std::vector<float> values(10, rank == 2 ? NAN : 1.0F);
          EntryPtr entry = allreduce_entry("weighted", values, ReduceOp::kAverage);
          entry->request.weighted = true;
          entry->weight = rank == 2 ? 0 : 1;
          CHECK_OK(run(engine, entry));
          CHECK_EQ(values[9], 1.0F);
          CHECK_EQ(found_by(engine), std::uint64_t{on && rank == 2 ? 2u : 0u});
          values[7] = rank == 2 ? NAN : 1.0F;
          CHECK_OK(run(engine, rows_entry(Kind::kReducescatter, "scattered", values)));
          CHECK_EQ(found_by(engine), std::uint64_t{on && rank == 2 ? 3u : 0u});
        },
        config);
  }
}

TEST(finite_check_on_a_gpu_blames_who_gives_them_in_every_form) {
  for (const char* nccl : {"libnccl.so.2", "nowhere"}) {
    GpuWorld world;
    world.config.check_finite = 1;
    world.libraries = {gpu_libraries(nccl)};
    world.run([](int rank, Engine& engine, Framework& gpu) { check_gpu_forms(engine, gpu, rank); });
  }
}

TEST(finite_check_on_a_gpu_blames_nobody_else_for_adasum) {
  for (const char* nccl : {"libnccl.so.2", "nowhere"}) {
    GpuWorld world{{0, 0, 0}};
    world.config.check_finite = 1;
    world.libraries = {gpu_libraries(nccl)};
    world.run([](int rank, Engine& engine, Framework& gpu) {
      std::vector<float> values(300, 1.0F);
      if (rank == 1) values[7] = NAN;  // of the part that rank 0 combines
      const OnDevice tensor = gpu.tensor(values);
      run_both(engine, gpu, gpu.entry("adasum", tensor, 300, ReduceOp::kAdasum));
      CHECK(std::isnan(gpu.read(tensor.data(), 300)[7]));
      // A rank that finds too much has found it by then.
      for (int i = 0; i < 20; ++i) {
        std::vector<float> none(1);
        CHECK_OK(run(engine, allreduce_entry("later", none)));
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      expect_found(engine, rank == 1 ? 1 : 0);
    });
  }
}

TEST(finite_check_of_nothing_leaves_the_next_tensors_alone) {
  GpuWorld world;
  world.config.check_finite = 1;
  world.run([](int, Engine& engine, Framework& gpu) {
    const OnDevice tensor = gpu.tensor({1.0F, 1.0F});
    run_both(engine, gpu, gpu.entry("nothing", tensor, 0));
    const EntryPtr whole = gpu.entry("whole numbers", tensor, 2);
    whole->request.tensors[0].dtype = whole->request.tensors[0].wire = DataType::kInt32;
    run_both(engine, gpu, whole);
    expect_found(engine, 0);
  });
}
