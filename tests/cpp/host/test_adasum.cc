// Adaptive summation against a plain computation in float64.
#include <cmath>

#include "backend_worlds.h"
#include "cpp/engine/engine_worlds.h"
#include "plain_adasum.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

Vector vector_of(int rank, std::size_t count, double prescale = 1) {
  Vector values;
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(prescale * (value_of(rank, i) + 0.25 * rank));
  }
  return values;
}

Vector expected_of(int size, std::size_t count, double prescale = 1) {
  std::vector<Vector> vectors;
  for (int rank = 0; rank < size; ++rank) vectors.push_back(vector_of(rank, count, prescale));
  return plain_adasum(vectors);
}

}  // namespace

TEST(adasum_is_what_the_formula_says_in_every_world) {
  const std::vector<std::pair<DataType, double>> types = {{DataType::kFloat64, 1e-12},
                                                          {DataType::kFloat32, 1e-5},
                                                          {DataType::kFloat16, 5e-3},
                                                          {DataType::kBfloat16, 4e-2}};
  for_every_world([&](int size, int rank, Backend& backend, const Group& world) {
    for (const auto& [dtype, tolerance] : types) {
      // Several tensors at once, one of them empty, one longer than a chunk.
      std::vector<std::vector<std::byte>> tensors;
      std::vector<Piece> pieces;
      const std::vector<std::size_t> counts = {5, 0, 1, 5000, 17};
      for (const std::size_t count : counts) {
        const Vector values = vector_of(rank, count);
        tensors.push_back(make_tensor(dtype, count, [&](std::size_t i) { return values[i]; }));
        pieces.push_back({tensors.back().data(), tensors.back().data(), count, 0.5, 3.0});
      }
      CHECK_OK(backend.allreduce({world, dtype, ReduceOp::kAdasum, pieces}, kPatience));
      for (std::size_t t = 0; t < counts.size(); ++t) {
        const Vector wanted = expected_of(size, counts[t], 0.5);
        for (std::size_t i = 0; i < counts[t]; ++i) {
          const double got = load(dtype, tensors[t].data() + i * size_of(dtype));
          CHECK(std::abs(got - 3 * wanted[i]) <= tolerance * (10 + std::abs(3 * wanted[i])));
        }
      }
    }
  });
}

TEST(adasum_adds_orthogonal_vectors_averages_equal_ones_and_passes_zeros) {
  run_hosts({0, 0}, [](int rank, Backend& backend, const Group& world) {
    std::vector<float> axis = {rank == 0 ? 2.0F : 0.0F, rank == 1 ? 3.0F : 0.0F};
    std::vector<float> same = {1.0F, -2.0F, 4.0F};
    std::vector<float> lonely = {rank == 1 ? 7.0F : 0.0F};
    const std::vector<Piece> pieces = {{axis.data(), axis.data(), axis.size()},
                                       {same.data(), same.data(), same.size()},
                                       {lonely.data(), lonely.data(), lonely.size()}};
    CHECK_OK(backend.allreduce({world, DataType::kFloat32, ReduceOp::kAdasum, pieces}, kPatience));
    CHECK_EQ(axis, (std::vector<float>{2, 3}));
    CHECK_EQ(same, (std::vector<float>{1, -2, 4}));
    CHECK_EQ(lonely, (std::vector<float>{7}));
  });
}

TEST(adasum_has_the_same_bits_whatever_travels_with_it) {
  run_world({0, 0, 1}, [](int rank, Engine& engine) {
    std::vector<float> first;
    for (int step = 0; step < 4; ++step) {
      std::vector<float> values(3001);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = std::sin(static_cast<float>(i * (rank + 1)));
      }
      std::vector<float> other(700, static_cast<float>(step + rank));
      const EntryPtr one = allreduce_entry("one", values, ReduceOp::kAdasum);
      const EntryPtr two = allreduce_entry("two", other, ReduceOp::kAdasum);
      if (step % 2 == 1) CHECK_OK(engine.enqueue(two, false));
      CHECK_OK(engine.enqueue(one, false));
      if (step % 2 == 1) CHECK_OK(finish(engine, two));
      CHECK_OK(finish(engine, one));
      if (first.empty()) first = values;
      CHECK_EQ(values, first);
    }
  });
}

TEST(adasum_refuses_integers_and_parts) {
  run_world({0, 0}, [](int, Engine& engine) {
    std::vector<float> values(4, 1.0F);
    EntryPtr whole = allreduce_entry("i", values, ReduceOp::kAdasum);
    whole->request.tensors[0].dtype = DataType::kInt32;
    CHECK_STATUS(engine.enqueue(whole, false), StatusCode::kInvalidArgument);
    EntryPtr part = allreduce_entry("r", values, ReduceOp::kAdasum);
    part->request.kind = Kind::kReducescatter;
    CHECK_STATUS(engine.enqueue(part, false), StatusCode::kInvalidArgument);
    CHECK_OK(run(engine, allreduce_entry("f", values, ReduceOp::kAdasum)));
    CHECK_EQ(values[0], 1.0F);
  });
}

TEST(fusion_plan_keeps_the_tensors_of_an_adasum_together_and_apart_from_others) {
  std::vector<float> values(40);
  std::vector<Agreed> round;
  for (int i = 0; i < 2; ++i) {
    EntryPtr entry = allreduce_entry("a", values, ReduceOp::kAdasum);
    entry->request.tensors.push_back({"b", DataType::kFloat64, {40}});
    entry->request.tensors.push_back({"c", DataType::kFloat32, {40}});
    round.push_back({entry, {}, {}, 0});
  }
  const auto batches = plan_batches(round, 80);
  CHECK_EQ(batches.size(), std::size_t{4});
  CHECK_EQ(batches[0].tensors.size(), std::size_t{2});
  CHECK_EQ(batches[1].tensors.size(), std::size_t{1});
}
