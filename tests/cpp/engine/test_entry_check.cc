// The entries that a rank refuses before it asks the others.
#include <random>
#include <span>
#include <string>
#include <vector>

#include "check.h"
#include "engine/entry.h"
#include "engine_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

std::string refusal(const Entry& entry) {
  const ProcessSets sets(1);
  return check_entry(entry, sets.get(0), 0).message();
}

// Tensors of so many floats that begin at these elements of one memory, reduced in place.
Entry in_place(std::vector<float>& memory, const std::vector<std::pair<int, int>>& places,
               Kind kind = Kind::kAllreduce) {
  Entry entry;
  entry.request.kind = kind;
  entry.request.root = 0;
  entry.request.name = "group";
  for (const auto& [begin, count] : places) {
    const std::string name = "group." + std::to_string(entry.inputs.size());
    entry.request.tensors.push_back({name, DataType::kFloat32, {count}});
    entry.inputs.push_back(memory.data() + begin);
    entry.outputs.push_back(memory.data() + begin);
  }
  return entry;
}

std::string refusal_of(DataType dtype, ReduceOp op, Kind kind = Kind::kAllreduce) {
  Entry entry;
  entry.request.kind = kind;
  entry.request.root = 0;
  entry.request.name = "x";
  entry.request.op = op;
  entry.request.tensors = {{"x", dtype, {4}}};
  entry.inputs = {nullptr};
  entry.outputs = {nullptr};
  return refusal(entry);
}

}  // namespace

TEST(entry_check_refuses_tensors_that_are_reduced_into_the_same_memory) {
  std::vector<float> memory(100);
  using Places = std::vector<std::pair<int, int>>;
  for (const Places& places : {Places{{0, 10}, {0, 10}}, Places{{50, 10}, {0, 51}},
                               Places{{0, 100}, {20, 1}}, Places{{9, 2}, {30, 4}, {0, 10}}}) {
    const std::string text = refusal(in_place(memory, places));
    CHECK(has(text, "allreduce 'group': tensors 'group.0' and 'group."));
    CHECK(has(text, "overlap in memory"));
  }
  CHECK(has(refusal(in_place(memory, {{9, 2}, {30, 4}, {0, 10}})), "'group.0' and 'group.2'"));
}

TEST(entry_check_takes_memory_that_is_shared_without_harm) {
  std::vector<float> memory(100);
  std::vector<float> results(100);
  CHECK_EQ(refusal(in_place(memory, {{0, 10}, {10, 10}, {20, 80}})), std::string());
  // Tensors without elements may lie anywhere.
  CHECK_EQ(refusal(in_place(memory, {{0, 10}, {5, 0}, {5, 0}, {0, 0}})), std::string());
  // One input twice.
  Entry entry = in_place(memory, {{0, 10}, {0, 10}});
  entry.outputs = {results.data(), results.data() + 10};
  CHECK_EQ(refusal(entry), std::string());
  // Tied parameters in a broadcast, and results that the core allocates.
  CHECK_EQ(refusal(in_place(memory, {{0, 10}, {0, 10}}, Kind::kBroadcast)), std::string());
  entry = in_place(memory, {{0, 10}, {0, 10}}, Kind::kAllgather);
  entry.outputs = {nullptr, nullptr};
  CHECK_EQ(refusal(entry), std::string());
}

TEST(entry_check_names_tensor_dtype_and_op_of_what_has_no_arithmetic) {
  for (int number = 0; number < kDataTypeCount; ++number) {
    const auto dtype = static_cast<DataType>(number);
    for (const ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kAdasum, ReduceOp::kMin,
                              ReduceOp::kMax, ReduceOp::kProduct}) {
      const bool orders = op == ReduceOp::kMin || op == ReduceOp::kMax;
      bool fine = computes(dtype) && !(orders && is_complex(dtype));
      if (op == ReduceOp::kAdasum) fine = is_floating(dtype);
      if (dtype == DataType::kBool) fine = is_logical(op);
      const std::string text = refusal_of(dtype, op);
      CHECK_EQ(text.empty(), fine);
      if (fine || op == ReduceOp::kAdasum || dtype == DataType::kBool) continue;
      CHECK(has(text, "'x', of dtype " + std::string(name_of(dtype)) + ", "));
      CHECK(has(text, std::string(name_of(op))));
    }
    CHECK_EQ(refusal_of(dtype, ReduceOp::kSum, Kind::kAllgather), std::string());
    CHECK_EQ(refusal_of(dtype, ReduceOp::kSum, Kind::kBroadcast), std::string());
    CHECK(!refusal_of(dtype, ReduceOp::kAdasum, Kind::kReducescatter).empty());
  }
}

// What passes these checks can be read by every other rank: a bad call is an error of that call,
// and never of the world.
TEST(entry_check_takes_no_shape_that_messages_do_not) {
  std::mt19937 random(7);
  const auto below = [&](std::uint32_t end) { return static_cast<int>(random() % end); };
  int taken = 0;
  for (int trial = 0; trial < 5000; ++trial) {
    Entry entry;
    entry.request.kind = below(2) == 0 ? Kind::kAllreduce : Kind::kAllgather;
    entry.request.name = std::string(static_cast<std::size_t>(below(2 * kMaxNameBytes)), 'x');
    TensorShape tensor{entry.request.name, DataType::kFloat32, {}};
    for (int left = below(kMaxDimensions + 3); left > 0; --left) {
      const std::int64_t most = std::int64_t{1} << below(trial % 2 == 0 ? 63 : 4);
      tensor.dims.push_back(below(4) == 0 ? 0 : most - below(2));
    }
    entry.request.tensors = {tensor};
    entry.inputs = {nullptr};
    entry.outputs = {nullptr};
    Submit sent;
    const Bytes frame = encode_submit({{}, {}, {entry.request}});
    const bool read = decode_submit(std::span(frame).subspan(5), sent);
    const bool takes = refusal(entry).empty();
    taken += takes ? 1 : 0;
    CHECK(read || !takes);
  }
  CHECK(taken > 100);
  std::vector<float> memory(1);
  Entry entry = in_place(memory, {{0, 0}});
  entry.request.tensors[0].dims = {0, std::int64_t{1} << 57};
  CHECK(has(refusal(entry), "dimensions that multiply to more than 2^56"));
  entry.request.tensors[0].dims = {0, std::int64_t{1} << 56};
  CHECK_EQ(refusal(entry), std::string());
}

TEST(entry_check_keeps_the_name_of_join) {
  std::vector<float> memory(1);
  Entry entry = in_place(memory, {{0, 1}});
  entry.request.name = kJoinName;
  CHECK(has(refusal(entry), "this name is that of join(); choose another one"));
  entry.request.kind = Kind::kJoin;
  entry.request.tensors.clear();
  CHECK_EQ(refusal(entry), std::string());
}

TEST(engine_reduces_bools_by_min_max_and_product) {
  for (const Hosts& hosts : {Hosts{0}, Hosts{0, 0, 0}, Hosts{0, 1, 1}}) {
    run_world(hosts, [](int rank, Engine& engine) {
      const std::uint8_t first = rank == 0 ? 1 : 0;
      const std::uint8_t own = engine.size() == 1 ? 1 : 0;
      for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
        std::vector<std::uint8_t> values = {0, 1, first};
        const EntryPtr entry = std::make_shared<Entry>();
        entry->request.name = "flags";
        entry->request.op = op;
        entry->request.tensors = {{"flags", DataType::kBool, {3}}};
        entry->inputs = {values.data()};
        entry->outputs = {values.data()};
        CHECK_OK(run(engine, entry));
        const std::uint8_t last = op == ReduceOp::kMax ? 1 : own;
        CHECK_EQ(values, (std::vector<std::uint8_t>{0, 1, last}));
      }
    });
  }
}
