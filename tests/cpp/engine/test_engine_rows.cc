// Whole engines in the collectives whose results have other rows than their inputs, and whose
// callers may give the memory for these.
#include <cstdint>
#include <numeric>
#include <vector>

#include "check.h"
#include "engine/entry.h"
#include "engine_worlds.h"
#include "host/host_backend.h"

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
    // Without splits, two rows to each rank.
    std::vector<float> rows(12, static_cast<float>(rank));
    entry = rows_entry(Kind::kAlltoall, "x", rows, 2);
    CHECK_OK(run(engine, entry));
    CHECK_EQ(entry->completion->first_dimensions, (std::vector<std::int64_t>{2, 2, 2}));
    CHECK_EQ(output_of(entry), (std::vector<float>{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2}));
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

TEST(engine_takes_several_tensors_in_one_gather) {
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
  });
}

namespace {

constexpr float kUntouched = -1.0F;
const std::vector<Hosts> kOutputWorlds = {{0, 0}, {0, 0, 0}, {0, 1}, {0, 1, 1, 0}};
const std::vector<Kind> kRowKinds = {Kind::kAllgather, Kind::kAlltoall, Kind::kReducescatter};

std::vector<float> memory_of(std::size_t count) { return std::vector<float>(count, kUntouched); }

// Lets the entry's only tensor write its result to this memory.
EntryPtr into(const EntryPtr& entry, std::span<float> memory) {
  entry->outputs = {memory.data()};
  entry->capacities = {memory.size_bytes()};
  return entry;
}

bool is_in_given_memory(const EntryPtr& entry, std::size_t index = 0) {
  const Completion::Output& output = entry->completion->outputs.at(index);
  return output.data == nullptr && !output.device.valid();
}

// `size` rows of one element for every kind, so that each gives a rank `size` rows or one.
std::vector<float> rows_of(int rank, int size) {
  return std::vector<float>(static_cast<std::size_t>(size), static_cast<float>(rank));
}

std::vector<float> expected_rows(Kind kind, int size) {
  std::vector<float> expected;
  if (kind == Kind::kReducescatter) return {static_cast<float>(size * (size - 1) / 2)};
  const int repeats = kind == Kind::kAllgather ? size : 1;
  for (int rank = 0; rank < size; ++rank) {
    expected.insert(expected.end(), repeats, static_cast<float>(rank));
  }
  return expected;
}

std::vector<float> first_of(const std::vector<float>& values, std::size_t count) {
  return {values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count)};
}

}  // namespace

TEST(engine_writes_rows_to_the_begin_of_larger_memory) {
  for (const Hosts& hosts : kOutputWorlds) {
    run_world(hosts, [](int rank, Engine& engine) {
      for (const Kind kind : kRowKinds) {
        std::vector<float> values = rows_of(rank, engine.size());
        const std::vector<float> expected = expected_rows(kind, engine.size());
        std::vector<float> memory = memory_of(expected.size() + 5);
        const EntryPtr entry = into(rows_entry(kind, "x", values), memory);
        CHECK_OK(run(engine, entry));
        CHECK(is_in_given_memory(entry));
        CHECK_EQ(entry->completion->outputs[0].bytes, expected.size() * sizeof(float));
        CHECK_EQ(first_of(memory, expected.size()), expected);
        CHECK_EQ(std::vector<float>(memory.end() - 5, memory.end()), memory_of(5));
      }
    });
  }
}

// The rank takes part, so the others have their results; and then all go on.
TEST(engine_names_the_rank_that_gave_too_little_memory_and_goes_on) {
  for (const Hosts& hosts : kOutputWorlds) {
    run_world(hosts, [](int rank, Engine& engine) {
      for (const Kind kind : kRowKinds) {
        for (int step = 0; step < 3; ++step) {
          std::vector<float> values = rows_of(rank, engine.size());
          const std::vector<float> expected = expected_rows(kind, engine.size());
          // Half of an element for the reducescatter, which gives each rank one.
          std::vector<float> memory = memory_of(expected.size());
          const EntryPtr entry = into(rows_entry(kind, "x", values), memory);
          if (rank == 1) entry->capacities[0] -= 2;
          const Status status = run(engine, entry);
          if (rank != 1) {
            CHECK_OK(status);
            CHECK_EQ(memory, expected);
            continue;
          }
          CHECK_STATUS(status, StatusCode::kInvalidArgument);
          CHECK(!status.sticky());
          const std::size_t bytes = expected.size() * sizeof(float);
          CHECK(has(status.message(), " 'x': rank 1 receives " + std::to_string(bytes) +
                                          " bytes for tensor 'x', and gave memory for " +
                                          std::to_string(bytes - 2) + ";"));
          CHECK_EQ(memory, memory_of(expected.size()));
        }
      }
      CHECK_OK(engine.status());
    });
  }
}

TEST(engine_gathers_no_rows_into_memory) {
  run_world({0, 0, 1}, [](int rank, Engine& engine) {
    std::vector<float> none;
    std::vector<float> memory = memory_of(2);
    for (const Kind kind : kRowKinds) {
      const EntryPtr entry = into(rows_entry(kind, "none", none), memory);
      CHECK_OK(run(engine, entry));
      CHECK_EQ(entry->completion->outputs[0].bytes, std::size_t{0});
      const EntryPtr nowhere = into(rows_entry(kind, "nowhere", none), {});
      CHECK_OK(run(engine, nowhere));
    }
    CHECK_EQ(memory, memory_of(2));
    // One rank alone gives rows; the others know of none, and one has no memory at all.
    std::vector<float> values(rank == 2 ? 2 : 0, 7.0F);
    const EntryPtr entry = into(rows_entry(Kind::kAllgather, "x", values), memory);
    if (rank == 0) into(entry, {});
    CHECK_OK(run(engine, entry));
    CHECK_EQ(rank == 0 ? output_of(entry) : memory, (std::vector<float>{7, 7}));
  });
}

TEST(engine_takes_inputs_that_lie_in_the_memory_of_the_result) {
  for (const Hosts& hosts : kOutputWorlds) {
    run_world(hosts, [](int rank, Engine& engine) {
      const int size = engine.size();
      for (const Kind kind : kRowKinds) {
        const std::vector<float> expected = expected_rows(kind, size);
        const std::size_t count = static_cast<std::size_t>(size);
        // Where the input begins, in the memory of the result: before it, at every part, behind it.
        for (std::size_t at = 0; at + count <= expected.size() + count; ++at) {
          std::vector<float> memory = memory_of(expected.size() + count);
          std::fill_n(memory.begin() + static_cast<std::ptrdiff_t>(at), count,
                      static_cast<float>(rank));
          const EntryPtr entry = rows_entry(kind, "x", memory);
          entry->request.tensors[0].dims = {size, 1};
          entry->inputs = {memory.data() + at};
          into(entry, std::span(memory).first(expected.size()));
          CHECK_OK(run(engine, entry));
          CHECK(is_in_given_memory(entry));
          CHECK_EQ(first_of(memory, expected.size()), expected);
        }
      }
    });
  }
}

TEST(engine_gives_each_tensor_its_own_memory_or_none) {
  run_world({0, 0, 1}, [](int rank, Engine& engine) {
    std::vector<float> values(1, static_cast<float>(rank));
    std::vector<float> first = memory_of(3);
    std::vector<float> third = memory_of(3);
    const EntryPtr entry = into(rows_entry(Kind::kAllgather, "g", values), first);
    for (const char* name : {"g.1", "g.2"}) {
      entry->request.tensors.push_back({name, DataType::kFloat32, {1, 1}});
      entry->inputs.push_back(values.data());
      entry->outputs.push_back(nullptr);
    }
    entry->outputs[2] = third.data();
    entry->capacities = {12, 0, rank == 2 ? std::uint64_t{8} : std::uint64_t{12}};
    const Status status = run(engine, entry);
    const std::vector<float> expected = {0, 1, 2};
    CHECK_EQ(first, expected);
    CHECK_EQ(output_of(entry, 1), expected);
    CHECK_EQ(third, rank == 2 ? memory_of(3) : expected);
    CHECK_STATUS(status, rank == 2 ? StatusCode::kInvalidArgument : StatusCode::kOk);
    if (rank == 2) CHECK(has(status.message(), "12 bytes for tensor 'g.2', and gave memory for 8"));

    // The first result would overwrite what is read for the second one.
    std::vector<float> memory = memory_of(6);
    memory[1] = static_cast<float>(10 + rank);
    const EntryPtr crossed =
        into(rows_entry(Kind::kAllgather, "c", values), std::span(memory).first(3));
    crossed->request.tensors.push_back({"c.1", DataType::kFloat32, {1, 1}});
    crossed->inputs.push_back(memory.data() + 1);
    crossed->outputs.push_back(memory.data() + 3);
    crossed->capacities.push_back(12);
    CHECK_OK(run(engine, crossed));
    CHECK_EQ(memory, (std::vector<float>{0, 1, 2, 10, 11, 12}));
  });
}

TEST(engine_of_one_gives_the_rows_back_or_writes_them_to_memory) {
  Engine engine(nullptr, std::make_unique<SelfBackend>(), Config());
  const auto refused = [&](const EntryPtr& entry) {
    CHECK_STATUS(run(engine, entry), StatusCode::kInvalidArgument);
  };
  std::vector<float> values{1, 2, 3, 4};
  const std::vector<float> before = values;
  for (const Kind kind : kRowKinds) {
    const EntryPtr entry = rows_entry(kind, "x", values, 2);
    CHECK_OK(run(engine, entry));
    CHECK_EQ(output_of(entry), values);
    CHECK_EQ(entry->completion->first_dimensions, (std::vector<std::int64_t>{2}));
    std::vector<float> memory = memory_of(4);
    CHECK_OK(run(engine, into(rows_entry(kind, "x", values, 2), memory)));
    CHECK_EQ(memory, values);
    CHECK_OK(run(engine, into(rows_entry(kind, "x", values, 2), values)));
    CHECK_EQ(values, before);
    refused(into(rows_entry(kind, "x", values, 2), std::span(memory).first(3)));
    if (kind == Kind::kAllgather) continue;
    const EntryPtr bad = rows_entry(kind, "x", values, 2);
    bad->request.splits = {kind == Kind::kAlltoall ? 3 : 1};
    refused(bad);
  }
  const EntryPtr flat = rows_entry(Kind::kReducescatter, "x", values, 2);
  flat->request.tensors[0].dims = {};
  refused(flat);
}

TEST(entry_check_refuses_memory_for_a_result_that_the_host_cannot_write) {
  const ProcessSets sets(1);
  std::vector<float> values(4);
  const auto refusal = [&](const EntryPtr& entry) {
    return check_entry(*entry, sets.get(0), 0).message();
  };
  const EntryPtr entry = into(rows_entry(Kind::kAllgather, "x", values), values);
  CHECK_EQ(refusal(entry), std::string());
  entry->outputs = {nullptr};
  CHECK(has(refusal(entry),
            "allgather 'x': memory that a caller gives for the result of tensor 'x'"));
  entry->outputs = {values.data()};
  entry->request.tensors[0].device = DeviceType::kGpu;
  entry->gpu = GpuSource{};
  CHECK(has(refusal(entry), "is host memory, at an address; without a capacity"));
}
