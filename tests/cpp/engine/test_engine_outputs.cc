// Whole engines whose callers give the memory for results with rows.
#include <cstdint>
#include <vector>

#include "backend/self_backend.h"
#include "check.h"
#include "engine_worlds.h"
#include "entry/entry_check.h"

using namespace hvdlite;
using namespace hvdlite::testing;

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

TEST(engine_of_one_writes_its_rows_to_memory) {
  Engine engine(nullptr, std::make_unique<SelfBackend>(), Config());
  for (const Kind kind : kRowKinds) {
    std::vector<float> values{1, 2, 3, 4};
    std::vector<float> memory = memory_of(4);
    CHECK_OK(run(engine, into(rows_entry(kind, "x", values, 2), memory)));
    CHECK_EQ(memory, values);
    const EntryPtr in_place = into(rows_entry(kind, "x", values, 2), values);
    CHECK_OK(run(engine, in_place));
    CHECK_EQ(values, (std::vector<float>{1, 2, 3, 4}));
    CHECK_STATUS(run(engine, into(rows_entry(kind, "x", values, 2), std::span(memory).first(3))),
                 StatusCode::kInvalidArgument);
    CHECK_OK(run(engine, rows_entry(kind, "x", values, 2)));
  }
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
