// The divisor of an average, and its range: an average never leaves the range of its type on the
// way.
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
