// All-reduces whose tensors are cast to a 16-bit float on the way: the bits of casting before and
// after, on every data plane.
#include <cmath>
#include <random>

#include "check.h"
#include "cpp/engine/engine_worlds.h"
#include "cpp/gpu/gpu_worlds.h"
#include "cpp/host/backend_worlds.h"
#include "engine/entry.h"
#include "kernels/reduce.h"
#include "rounds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

constexpr ElementTypes kCasts[] = {{DataType::kFloat32, DataType::kFloat16},
                                   {DataType::kFloat32, DataType::kBfloat16},
                                   {DataType::kFloat64, DataType::kFloat16},
                                   {DataType::kFloat64, DataType::kBfloat16}};
constexpr std::size_t kCounts[] = {5, 3000, 0, 1, 700};

// A value that is not a 16-bit number, so that every rounding shows.
double uneven(int rank, std::size_t i) {
  return std::sin(static_cast<double>(i + 1)) * (rank + 0.1) * 3;
}

using Tensor = std::vector<std::byte>;

Tensor cast(const Tensor& tensor, DataType from, DataType to) {
  return make_tensor(to, tensor.size() / size_of(from),
                     [&](std::size_t i) { return load(from, tensor.data() + i * size_of(from)); });
}

// Times a factor that is exact in every type, as the type itself computes.
Tensor times(const Tensor& tensor, DataType type, double factor) {
  return make_tensor(type, tensor.size() / size_of(type), [&](std::size_t i) {
    const double value = load(type, tensor.data() + i * size_of(type));
    if (type == DataType::kFloat64) return value * factor;
    return static_cast<double>(static_cast<float>(value) * static_cast<float>(factor));
  });
}

struct CastTensors {
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  std::vector<Piece> pieces;
  CastTensors(std::vector<Tensor> tensors, DataType type, double prescale, double postscale,
              bool in_place)
      : inputs(std::move(tensors)), outputs(inputs) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const void* input = in_place ? outputs[i].data() : inputs[i].data();
      pieces.push_back(
          {input, outputs[i].data(), inputs[i].size() / size_of(type), prescale, postscale});
    }
  }
};

// The cast by hand, around an all-reduce of the narrow values.
std::vector<Tensor> by_hand(Backend& backend, const Group& world, ElementTypes types, ReduceOp op,
                            const std::vector<Tensor>& tensors, double prescale, double postscale) {
  std::vector<Tensor> narrow;
  for (const Tensor& tensor : tensors) {
    narrow.push_back(cast(prescale == 1 ? tensor
                                        : times(cast(tensor, types.memory, DataType::kFloat64),
                                                DataType::kFloat64, prescale),
                          prescale == 1 ? types.memory : DataType::kFloat64, types.wire));
  }
  CastTensors batch(std::move(narrow), types.wire, 1.0, 1.0, true);
  CHECK_OK(backend.allreduce({world, types.wire, op, batch.pieces}, kPatience));
  std::vector<Tensor> results;
  for (const Tensor& result : batch.outputs) {
    const Tensor wide = cast(result, types.wire, types.memory);
    results.push_back(postscale == 1 ? wide : times(wide, types.memory, postscale));
  }
  return results;
}

}  // namespace

TEST(wire_dtype_gives_the_bits_of_casting_by_hand) {
  for_every_world([](int, int rank, Backend& backend, const Group& world) {
    for (const ElementTypes types : kCasts) {
      // A GPU's float64 is summed on the host, in another order than NCCL's: small whole numbers
      // have the same sum in every order.
      const bool whole =
          types.memory == DataType::kFloat64 && dynamic_cast<ThroughDevice*>(&backend) != nullptr;
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                                ReduceOp::kProduct}) {
        if (whole && (op == ReduceOp::kAverage || op == ReduceOp::kProduct)) continue;
        std::vector<Tensor> tensors;
        for (const std::size_t count : kCounts) {
          tensors.push_back(make_tensor(types.memory, count, [&](auto i) {
            return whole ? std::round(uneven(rank, i)) : uneven(rank, i);
          }));
        }
        const auto expected = by_hand(backend, world, types, op, tensors, 1, 1);
        const bool in_place = op == ReduceOp::kSum;
        CastTensors batch(tensors, types.memory, 1, 1, in_place);
        CHECK_OK(backend.allreduce({world, types, op, batch.pieces}, kPatience));
        CHECK(batch.outputs == expected);
        CHECK(batch.inputs == tensors);
        // Alone, the largest one goes another way, and a small one as well.
        for (const std::size_t i : {std::size_t{1}, std::size_t{3}}) {
          CastTensors alone({tensors[i]}, types.memory, 1, 1, !in_place);
          CHECK_OK(backend.allreduce({world, types, op, alone.pieces}, kPatience));
          CHECK(alone.outputs[0] == expected[i]);
        }
      }
    }
  });
}

TEST(wire_dtype_scales_in_the_type_of_the_tensors) {
  for_every_world([](int size, int rank, Backend& backend, const Group& world) {
    // float16 does not have 100000, nor the sum of the inputs of all ranks.
    const ElementTypes types{DataType::kFloat32, DataType::kFloat16};
    const double prescale = 0x1p-10;
    const double postscale = 0x1p11;
    const std::vector<Tensor> tensors = {
        make_tensor(types.memory, 900, [&](auto i) { return 1e5 + uneven(rank, i); })};
    const auto expected =
        by_hand(backend, world, types, ReduceOp::kSum, tensors, prescale, postscale);
    CastTensors batch(tensors, types.memory, prescale, postscale, false);
    CHECK_OK(backend.allreduce({world, types, ReduceOp::kSum, batch.pieces}, kPatience));
    CHECK(batch.outputs == expected);
    const double one = load(types.memory, batch.outputs[0].data());
    CHECK(std::abs(one - 2e5 * size) < 2e5 * size * 1e-2);
  });
}

TEST(wire_dtype_casts_alike_with_every_instruction_set) {
  if (best_cast() == &portable::cast_any) return;  // this processor has one variant only
  std::mt19937_64 random(5);
  for (const ElementTypes there : kCasts) {
    for (const ElementTypes types : {there, ElementTypes(there.wire, there.memory)}) {
      const std::size_t count = 3001;
      Tensor from(count * size_of(types.memory) + 1);
      for (std::size_t i = 0; i < count; ++i) {
        // Every magnitude: subnormals, ties, overflow, infinity.
        const double value = std::ldexp(static_cast<double>(random() % 4097) - 2048,
                                        static_cast<int>(random() % 60) - 40);
        testing::store(types.memory, from.data() + 1 + i * size_of(types.memory),
                       i == 7 ? INFINITY : value);
      }
      for (const double factor : {1.0, 0.3}) {
        Tensor best(count * size_of(types.wire));
        Tensor plain(best.size());
        best_cast()(types, from.data() + 1, best.data(), count, factor);
        portable::cast_any(types, from.data() + 1, plain.data(), count, factor);
        CHECK(best == plain);
      }
    }
  }
}

TEST(wire_dtype_keeps_a_nan) {
  for (const ElementTypes types : kCasts) {
    const Tensor nan = make_tensor(types.memory, 20, [](auto) { return std::nan(""); });
    Tensor narrow(20 * size_of(types.wire));
    scale_copy(types, nan.data(), narrow.data(), 20, 1.0);
    for (std::size_t i = 0; i < 20; ++i) {
      CHECK(std::isnan(load(types.wire, narrow.data() + i * size_of(types.wire))));
    }
  }
}

namespace {

EntryPtr cast_entry(const std::string& name, std::vector<float>& values,
                    DataType wire = DataType::kFloat16) {
  EntryPtr entry = allreduce_entry(name, values);
  entry->request.tensors[0].wire = wire;
  return entry;
}

}  // namespace

TEST(wire_dtype_tensors_share_a_batch_with_their_like_alone) {
  Round round = round_of({"a", "b", "c", "d"}, 100);
  round.entries[1].entry->request.tensors[0].wire = DataType::kFloat16;
  round.entries[2].entry->request.tensors[0].wire = DataType::kFloat16;
  round.entries[3].entry->request.tensors[0].wire = DataType::kBfloat16;
  const auto batches = plan_batches(round.entries, 400);
  CHECK_EQ(batches.size(), std::size_t{3});
  CHECK_EQ(batches[1].tensors.size(), std::size_t{2});
  CHECK_EQ(batches[1].bytes, std::uint64_t{400});  // of what travels
}

TEST(wire_dtype_is_agreed_upon_remembered_and_counted) {
  run_world({0, 0, 1}, [](int rank, Engine& engine) {
    for (int step = 0; step < 4; ++step) {
      std::vector<float> values(3000, 1.0F + 0x1p-13F);
      CHECK_OK(run(engine, cast_entry("x", values)));
      CHECK_EQ(values[2999], 3.0F);
    }
    CHECK(engine.counters().cache_hits.get() > 0);
    CHECK_EQ(engine.counters().bytes.get(), std::uint64_t{4 * 3000 * 2});
    std::vector<float> values(10, 1.0F);
    const Status status = run(
        engine, rank == 1 ? cast_entry("x", values, DataType::kFloat32) : cast_entry("x", values));
    CHECK_STATUS(status, StatusCode::kMismatch);
    // Rank 1 is compared with the one that came first, or is that one.
    CHECK(has(status.message(), "ranks disagree about the wire dtype: rank "));
    CHECK(has(status.message(), " has float16") && has(status.message(), "rank 1 has float32"));
    CHECK_OK(run(engine, cast_entry("x", values, DataType::kBfloat16)));
    CHECK_EQ(values[0], 3.0F);
    // What a weighted average takes of a rank is scaled before it is cast.
    std::vector<float> heavy(50, rank == 0 ? INFINITY : 1e6F * static_cast<float>(rank));
    EntryPtr weighted = cast_entry("w", heavy);
    weighted->request.op = ReduceOp::kAverage;
    weighted->request.weighted = true;
    weighted->request.prescale = 1e-3;
    weighted->weight = rank;
    CHECK_OK(run(engine, weighted));
    CHECK(std::abs(heavy[49] - 5e3F / 3) < 2);
  });
}

TEST(wire_dtype_is_refused_where_it_means_nothing) {
  const ProcessSets sets(1);
  std::vector<float> values(4);
  const auto refusal = [&](const EntryPtr& entry) {
    return check_entry(*entry, sets.get(0), 0).message();
  };
  CHECK_EQ(refusal(cast_entry("x", values)), std::string());
  CHECK_EQ(refusal(cast_entry("x", values, DataType::kFloat64)),
           std::string("allreduce 'x': a wire dtype is float16 or bfloat16, of a float32 or "
                       "float64 tensor"));
  for (const DataType type : {DataType::kInt32, DataType::kBfloat16, DataType::kComplex64}) {
    EntryPtr other = cast_entry("x", values);
    other->request.tensors[0].dtype = type;
    CHECK(refusal(other).find("of a float32 or float64 tensor") != std::string::npos);
  }
  for (const bool adasum : {true, false}) {
    EntryPtr other = cast_entry("x", values);
    other->request.op = adasum ? ReduceOp::kAdasum : ReduceOp::kSum;
    other->request.kind = adasum ? Kind::kAllreduce : Kind::kReducescatter;
    CHECK(refusal(other).find("a wire dtype goes with allreduce, and not with Adasum") !=
          std::string::npos);
  }
}
