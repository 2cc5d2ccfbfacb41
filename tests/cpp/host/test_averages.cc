// The divisor of an average, and its range: an average never leaves the range of its type on the
// way. Then adaptive summation against a plain computation in float64.
#include <cmath>
#include <vector>

#include "backend_worlds.h"
#include "check.h"
#include "cpp/engine/engine_worlds.h"
#include "cpp/gpu/gpu_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

const std::vector<Hosts> kHostWorlds = {{0, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 1, 1, 1, 1},
                                        {0, 0, 0, 1, 1, 1, 1, 1}, {0, 1, 2},
                                        {0, 1, 2, 1, 2, 2, 0},    {0, 0, 1}};

// Every 16-bit float but infinities and NaN; of bfloat16 those whose sums float32 can hold.
std::vector<std::uint16_t> finite_values(DataType type) {
  std::vector<std::uint16_t> values;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float wide =
        type == DataType::kFloat16 ? to_float(Float16{half}) : to_float(Bfloat16{half});
    // Below the normal range of float16 a host's mean is rounded.
    if (std::isfinite(wide) && std::abs(wide) < 1e37F && std::abs(wide) > 0x1p-14F) {
      values.push_back(half);
    }
  }
  return values;
}

}  // namespace

TEST(average_of_equal_16_bit_floats_is_that_value_on_any_hosts) {
  for (const Hosts& hosts : kHostWorlds) {
    run_hosts(hosts, [&](int rank, Backend& backend, const Group& world) {
      for (const DataType type : {DataType::kFloat16, DataType::kBfloat16}) {
        const auto given = finite_values(type);
        auto values = given;
        const Piece piece{values.data(), values.data(), values.size()};
        CHECK_OK(backend.allreduce({world, type, ReduceOp::kAverage, {&piece, 1}}, kPatience));
        CHECK(values == given);
        // A reduce-scatter: the first member takes all, then all but one take the same.
        std::vector<std::uint64_t> counts(hosts.size(), given.size() / hosts.size());
        counts[0] += given.size() % hosts.size();
        std::vector<std::uint16_t> block(counts[rank]);
        const Piece scattered{given.data(), block.data(), given.size()};
        CHECK_OK(
            backend.reducescatter({world, type, ReduceOp::kAverage, scattered, counts}, kPatience));
        std::uint64_t begin = 0;
        for (int r = 0; r < rank; ++r) begin += counts[r];
        CHECK(std::equal(block.begin(), block.end(),
                         given.begin() + static_cast<std::ptrdiff_t>(begin)));
      }
    });
  }
}

TEST(average_of_wide_floats_that_travel_as_16_bits_does_not_overflow) {
  for (const Hosts& hosts : kHostWorlds) {
    run_hosts(hosts, [](int, Backend& backend, const Group& world) {
      for (const DataType wire : {DataType::kFloat16, DataType::kBfloat16}) {
        std::vector<float> values(3000, 40960.0F);
        const Piece piece{values.data(), values.data(), values.size()};
        CHECK_OK(backend.allreduce(
            {world, {DataType::kFloat32, wire}, ReduceOp::kAverage, {&piece, 1}}, kPatience));
        CHECK_EQ(values, std::vector<float>(3000, 40960.0F));
      }
    });
  }
}

TEST(average_can_divide_by_more_ranks_than_give) {
  const EveryBody body = [](int size, int rank, Backend& backend, const Group& world) {
    Group group = world;
    group.average_over = size + 3;
    const int sum = size * (size + 1) / 2;
    std::vector<float> floats(3000, static_cast<float>(rank + 1));
    const Piece of_floats{floats.data(), floats.data(), floats.size()};
    CHECK_OK(backend.allreduce({group, DataType::kFloat32, ReduceOp::kAverage, {&of_floats, 1}},
                               kPatience));
    const float mean = static_cast<float>(sum) / static_cast<float>(size + 3);
    CHECK(std::abs(floats[2999] - mean) <= 1e-6F * mean);
    std::vector<std::int32_t> integers(3000, 7 * (rank + 1));
    const Piece of_integers{integers.data(), integers.data(), integers.size()};
    CHECK_OK(backend.allreduce({group, DataType::kInt32, ReduceOp::kAverage, {&of_integers, 1}},
                               kPatience));
    CHECK_EQ(integers[2999], 7 * sum / (size + 3));
    std::vector<std::uint16_t> halves(3000, to_float16(static_cast<float>(size + 3)).bits);
    const Piece of_halves{halves.data(), halves.data(), halves.size()};
    CHECK_OK(backend.allreduce({group, DataType::kFloat16, ReduceOp::kAverage, {&of_halves, 1}},
                               kPatience));
    CHECK(std::abs(to_float(Float16{halves[0]}) - static_cast<float>(size)) < 0.01F);
    std::vector<std::uint64_t> counts(static_cast<std::size_t>(size), 5);
    std::vector<float> input(5 * counts.size(), static_cast<float>(rank + 1));
    std::vector<float> block(5);
    const Piece scattered{input.data(), block.data(), input.size()};
    CHECK_OK(backend.reducescatter(
        {group, DataType::kFloat32, ReduceOp::kAverage, scattered, counts}, kPatience));
    CHECK(std::abs(block[4] - mean) <= 1e-6F * mean);
  };
  for_every_world(body);
}

TEST(average_counts_the_joined_as_well_where_the_knob_says_so) {
  for (const bool all : {false, true}) {
    Config config = quick_config();
    config.average_over_joined = all ? 1 : 0;
    run_world(
        {0, 1, 1},
        [all](int rank, Engine& engine) {
          if (rank > 0) {
            std::vector<float> values(2000, static_cast<float>(rank));
            EntryPtr entry = allreduce_entry("mean", values, ReduceOp::kAverage);
            CHECK_OK(run(engine, entry));
            CHECK_EQ(values[1999], all ? 1.0F : 1.5F);
            CHECK_EQ(entry->completion->members, all ? 3 : 2);
          }
          CHECK_OK(run(engine, join_entry()));
          std::vector<float> values(2000, static_cast<float>(rank));
          CHECK_OK(run(engine, allreduce_entry("mean", values, ReduceOp::kAverage)));
          CHECK_EQ(values[0], 1.0F);
        },
        config);
  }
}

namespace {

// Adaptive summation in float64, written down as the formula is.
using Vector = std::vector<double>;

double dot(const Vector& a, const Vector& b) {
  double total = 0;
  for (std::size_t i = 0; i < a.size(); ++i) total += a[i] * b[i];
  return total;
}

Vector plain_adasum(const Vector& a, const Vector& b) {
  const double aa = dot(a, a);
  const double bb = dot(b, b);
  const double ab = dot(a, b);
  Vector result;
  for (std::size_t i = 0; i < a.size(); ++i) {
    result.push_back((aa == 0 ? 1 : 1 - ab / (2 * aa)) * a[i] +
                     (bb == 0 ? 1 : 1 - ab / (2 * bb)) * b[i]);
  }
  return result;
}

Vector plain_adasum(std::vector<Vector> vectors) {
  while (vectors.size() > 1) {
    std::vector<Vector> next;
    for (std::size_t i = 0; i + 1 < vectors.size(); i += 2) {
      next.push_back(plain_adasum(vectors[i], vectors[i + 1]));
    }
    if (vectors.size() % 2 == 1) next.push_back(vectors.back());
    vectors = next;
  }
  return vectors[0];
}

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
