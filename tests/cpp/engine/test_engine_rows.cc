// Whole engines in the collectives whose results have other rows than their inputs.
#include <numeric>

#include "backend/self_backend.h"
#include "check.h"
#include "engine_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

const std::vector<Hosts> kWorlds = {{0, 0}, {0, 0, 0}, {0, 1}, {0, 0, 1}, {0, 1, 1, 0}};

}  // namespace

TEST(engine_exchanges_rows_by_splits) {
  for (const Hosts& hosts : kWorlds) {
    run_world(hosts, [&](int rank, Engine& engine) {
      for (int step = 0; step < 3; ++step) {
        std::vector<std::int64_t> splits;
        std::vector<std::int64_t> wanted;
        std::vector<float> values;
        std::vector<float> expected;
        for (int peer = 0; peer < engine.size(); ++peer) {
          splits.push_back((rank + 2 * peer + step) % 3);
          wanted.push_back((peer + 2 * rank + step) % 3);
          values.insert(values.end(), 2 * splits.back(), static_cast<float>(10 * rank + peer));
          expected.insert(expected.end(), 2 * wanted.back(), static_cast<float>(10 * peer + rank));
        }
        EntryPtr entry = rows_entry(Kind::kAlltoall, "x", values, 2);
        entry->request.splits = splits;
        CHECK_OK(run(engine, entry));
        CHECK_EQ(entry->completion->first_dimensions, wanted);
        CHECK_EQ(output_of(entry), expected);
      }
    });
  }
}

TEST(engine_tells_every_rank_of_bad_splits_and_goes_on) {
  const std::vector<std::pair<std::vector<std::int64_t>, std::string>> cases = {
      {{1, 1, 1}, " has splits [1, 1, 1], which add up to 3, but 4 rows"},
      {{2, 2}, " has 2 splits in a process set of 3; give one for each member"},
      {{5, -1, 0}, " has a negative split: [5, -1, 0]"},
      {{INT64_MAX, INT64_MAX, 6}, "but 4 rows"},
      {{}, " has 4 rows, which cannot be split evenly in a process set of 3; give splits"}};
  run_world({0, 0, 1}, [&](int rank, Engine& engine) {
    std::vector<float> values(8, 1.0F);
    for (const Kind kind : {Kind::kAlltoall, Kind::kReducescatter}) {
      for (const auto& [splits, text] : cases) {
        const bool scatters = kind == Kind::kReducescatter;
        if (scatters && splits.empty()) continue;
        EntryPtr entry = rows_entry(kind, "x", values, 2);
        // In a reduce-scatter all ranks have the same splits.
        entry->request.splits = rank == 1 || scatters ? splits : std::vector<std::int64_t>{4, 0, 0};
        const Status status = run(engine, entry);
        CHECK_STATUS(status, StatusCode::kInvalidArgument);
        if (!scatters) CHECK_EQ(status.failed_rank(), 1);
        const std::string rank_text = "rank " + std::to_string(status.failed_rank());
        CHECK(status.message().find(std::string(name_of(kind)) + " 'x': " + rank_text) == 0);
        CHECK(has(status.message(), text));
      }
    }
    EntryPtr entry = rows_entry(Kind::kReducescatter, "x", values, 2);
    entry->request.splits = {rank == 1 ? 2 : 1, 1, rank == 1 ? 1 : 2};
    const Status status = run(engine, entry);
    CHECK_STATUS(status, StatusCode::kMismatch);
    CHECK(has(status.message(), "ranks disagree about the splits: rank "));
    CHECK(has(status.message(), "rank 1 has [2, 1, 1]"));
    CHECK(has(status.message(), "[1, 1, 2]"));
    entry = rows_entry(Kind::kReducescatter, "x", values, 2);
    if (rank == 2) entry->request.splits = {2, 1, 1};
    CHECK_STATUS(run(engine, entry), StatusCode::kMismatch);
    std::vector<float> six(6, 1.0F);
    CHECK_OK(run(engine, rows_entry(Kind::kAlltoall, "x", six, 2)));
  });
}

TEST(engine_remembers_splits_of_a_reducescatter) {
  run_world({0, 0, 1}, [](int rank, Engine& engine) {
    const std::vector<std::vector<std::int64_t>> steps = {{1, 0, 3}, {1, 0, 3}, {4, 0, 0}, {}};
    for (const auto& splits : steps) {
      std::vector<float> values(4, 1.0F);
      EntryPtr entry = rows_entry(Kind::kReducescatter, "x", values);
      entry->request.splits = splits;
      CHECK_OK(run(engine, entry));
      const std::int64_t even = rank == 0 ? 2 : 1;
      const auto place = static_cast<std::size_t>(rank);
      CHECK_EQ(entry->completion->first_dimensions,
               (std::vector<std::int64_t>{splits.empty() ? even : splits[place]}));
    }
    CHECK_EQ(engine.counters().cache_hits.get(), std::uint64_t{1});
  });
}

TEST(engine_scatters_several_tensors_by_splits) {
  run_world({0, 1, 1}, [](int rank, Engine& engine) {
    std::vector<float> a(6, 1.0F);
    std::vector<double> b(3, rank);
    EntryPtr entry = rows_entry(Kind::kReducescatter, "s", a, 2);
    entry->request.tensors.push_back({"b", DataType::kFloat64, {3}});
    entry->request.tensors.push_back({"empty", DataType::kFloat32, {0, 7}});
    entry->inputs = {a.data(), b.data(), nullptr};
    entry->outputs = {nullptr, nullptr, nullptr};
    entry->request.splits = {3, 0, 0, 0, 1, 2, 0, 0, 0};
    CHECK_OK(run(engine, entry));
    CHECK_EQ(entry->completion->first_dimensions,
             (std::vector<std::int64_t>{rank == 0 ? 3 : 0, rank, 0}));
    CHECK_EQ(output_of(entry, 0), std::vector<float>(rank == 0 ? 6 : 0, 3.0F));
    CHECK_EQ(entry->completion->outputs.at(1).bytes, sizeof(double) * rank);
  });
}

TEST(engine_takes_several_tensors_in_one_gather_and_one_scatter) {
  run_world({0, 0, 1}, [](int rank, Engine& engine) {
    std::vector<float> a(2 * static_cast<std::size_t>(rank), static_cast<float>(rank));
    std::vector<std::uint8_t> b(1, static_cast<std::uint8_t>(rank + 1));
    EntryPtr gather = rows_entry(Kind::kAllgather, "g", a, 2);
    gather->request.tensors.push_back({"b", DataType::kUint8, {1}});
    gather->inputs.push_back(b.data());
    gather->outputs.push_back(nullptr);
    CHECK_OK(run(engine, gather));
    CHECK_EQ(gather->completion->first_dimensions, (std::vector<std::int64_t>{0, 1, 2, 1, 1, 1}));
    CHECK_EQ(output_of(gather), (std::vector<float>{1, 1, 2, 2, 2, 2}));
    CHECK(gather->completion->outputs.at(1).data[2] == std::byte{3});

    std::vector<float> c(6, 1.0F);
    std::vector<float> d(2, static_cast<float>(rank));
    EntryPtr scatter = rows_entry(Kind::kReducescatter, "s", c, 2);
    scatter->request.tensors.push_back({"d", DataType::kFloat32, {2}});
    scatter->inputs.push_back(d.data());
    scatter->outputs.push_back(nullptr);
    CHECK_OK(run(engine, scatter));
    CHECK_EQ(scatter->completion->first_dimensions,
             (std::vector<std::int64_t>{1, rank < 2 ? 1 : 0}));
    CHECK_EQ(output_of(scatter, 0), (std::vector<float>{3, 3}));
    CHECK_EQ(output_of(scatter, 1), rank < 2 ? std::vector<float>{3} : std::vector<float>());
  });
}

TEST(engine_of_one_gives_the_rows_back) {
  Engine engine(nullptr, std::make_unique<SelfBackend>(), Config());
  std::vector<float> values{1, 2, 3, 4};
  for (const Kind kind : {Kind::kAllgather, Kind::kAlltoall, Kind::kReducescatter}) {
    EntryPtr entry = rows_entry(kind, "x", values, 2);
    CHECK_OK(run(engine, entry));
    CHECK_EQ(output_of(entry), values);
    CHECK_EQ(entry->completion->first_dimensions, (std::vector<std::int64_t>{2}));
  }
  EntryPtr bad = rows_entry(Kind::kAlltoall, "x", values, 2);
  bad->request.splits = {3};
  CHECK_STATUS(run(engine, bad), StatusCode::kInvalidArgument);
  bad = rows_entry(Kind::kReducescatter, "x", values, 2);
  bad->request.splits = {1};
  CHECK_STATUS(run(engine, bad), StatusCode::kInvalidArgument);
  EntryPtr flat = rows_entry(Kind::kReducescatter, "x", values, 2);
  flat->request.tensors[0].dims = {};
  CHECK_STATUS(run(engine, flat), StatusCode::kInvalidArgument);
}
