// Numbers that travel as small integers between hosts: the kernels, and the all-reduces of every
// data plane against a reference that packs the hosts' sums by itself.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "backend/self_backend.h"
#include "backend_worlds.h"
#include "check.h"
#include "cpp/engine/engine_worlds.h"
#include "cpp/gpu/gpu_worlds.h"
#include "cpp/negotiation/rounds.h"
#include "entry/entry_check.h"
#include "execution/fusion_plan.h"
#include "kernels/packed.h"
#include "kernels/packed_variants.h"
#include "kernels/reduce.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

using Tensor = std::vector<std::byte>;

// Blocks of one number and of all but one, a tensor without elements, one of many chunks.
constexpr std::size_t kPackedCounts[] = {1, 255, 256, 257, 0, 5000, 40000, 3};

// Blocks differ in their magnitude by up to 2^12.
double uneven_block(int rank, std::size_t i) {
  const double size = std::ldexp(1.0, static_cast<int>(i / 256 % 13));
  return std::sin(static_cast<double>(i + 1) * (rank + 0.7)) * size;
}

Tensor packed_and_back(DataType dtype, const Tensor& tensor) {
  const std::size_t count = tensor.size() / size_of(dtype);
  Tensor packed(packed_bytes(count));
  Tensor back(tensor.size());
  pack(dtype, tensor.data(), count, packed.data());
  unpack(dtype, packed.data(), count, back.data());
  return back;
}

std::vector<float> floats(const Tensor& tensor, DataType dtype = DataType::kFloat32) {
  std::vector<float> values(tensor.size() / size_of(dtype));
  scale_copy({dtype, DataType::kFloat32}, tensor.data(), values.data(), values.size(), 1.0);
  return values;
}

// What each host gives: the reduction of its members' tensors.
std::vector<Tensor> given_by_hosts(const Hosts& hosts, DataType dtype, ReduceOp op,
                                   const std::vector<Tensor>& tensors, std::vector<int>& counts) {
  std::vector<Tensor> given;
  for (const int host : std::vector<int>{0, 1, 2}) {
    std::vector<const void*> members;
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      if (hosts[rank] == host) members.push_back(tensors[rank].data());
    }
    if (members.empty()) continue;
    counts.push_back(static_cast<int>(members.size()));
    const bool mean = op == ReduceOp::kAverage && dtype != DataType::kFloat32;
    given.emplace_back(tensors[0].size());
    reduce(dtype, ReduceOp::kSum, members, given.back().data(),
           given.back().size() / size_of(dtype), {mean ? counts.back() : 1});
  }
  return given;
}

// One tensor of all ranks, reduced as the hosts do.
Tensor reference(const Hosts& hosts, DataType dtype, ReduceOp op,
                 const std::vector<Tensor>& tensors, double postscale) {
  std::vector<int> counts;
  const std::vector<Tensor> given = given_by_hosts(hosts, dtype, op, tensors, counts);
  const std::size_t count = tensors[0].size() / size_of(dtype);
  std::vector<Tensor> packed;
  std::vector<const std::byte*> sources;
  for (const Tensor& one : given) {
    packed.emplace_back(packed_bytes(count));
    pack(dtype, one.data(), count, packed.back().data());
  }
  for (const Tensor& one : packed) sources.push_back(one.data());
  const bool means = op == ReduceOp::kAverage && dtype != DataType::kFloat32;
  const int divisor = op == ReduceOp::kAverage ? static_cast<int>(hosts.size()) : 1;
  Tensor result(packed_bytes(count));
  Tensor back(tensors[0].size());
  sum_packed(sources, count, {divisor, postscale, means ? counts.data() : nullptr}, result.data());
  unpack(dtype, result.data(), count, back.data());
  return back;
}

Tensor input_of(DataType dtype, int rank, std::size_t count) {
  return make_tensor(dtype, count, [&](std::size_t i) { return uneven_block(rank, i); });
}

std::vector<Tensor> references(const Hosts& hosts, DataType dtype, ReduceOp op, double postscale) {
  std::vector<Tensor> results;
  for (const std::size_t count : kPackedCounts) {
    std::vector<Tensor> inputs;
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      inputs.push_back(input_of(dtype, static_cast<int>(rank), count));
    }
    results.push_back(reference(hosts, dtype, op, inputs, postscale));
  }
  return results;
}

Piece packed_piece(const void* input, void* output, std::size_t count, double postscale = 1.0) {
  Piece piece{input, output, count, 1.0, postscale};
  piece.packed = true;
  return piece;
}

// Reduces tensors of kPackedCounts elements in one batch, and then the largest alone.
void check_bits(Backend& backend, const Group& world, int rank, DataType dtype, ReduceOp op,
                double postscale, const std::vector<Tensor>& expected) {
  std::vector<Tensor> inputs;
  for (const std::size_t count : kPackedCounts) inputs.push_back(input_of(dtype, rank, count));
  std::vector<Tensor> outputs = inputs;
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const void* input = i % 2 == 0 ? outputs[i].data() : inputs[i].data();
    pieces.push_back(packed_piece(input, outputs[i].data(), kPackedCounts[i], postscale));
  }
  CHECK_OK(backend.allreduce({world, dtype, op, pieces}, kPatience));
  CHECK(outputs == expected);
  Tensor alone = inputs[6];
  const Piece piece = packed_piece(alone.data(), alone.data(), kPackedCounts[6], postscale);
  CHECK_OK(backend.allreduce({world, dtype, op, {&piece, 1}}, kPatience));
  CHECK(alone == expected[6]);
}

}  // namespace

TEST(packed_numbers_are_off_by_half_a_scale_at_most) {
  for (const std::size_t count : kPackedCounts) {
    const Tensor tensor = input_of(DataType::kFloat32, 0, count);
    const std::vector<float> exact = floats(tensor);
    const std::vector<float> back = floats(packed_and_back(DataType::kFloat32, tensor));
    for (std::size_t begin = 0; begin < count; begin += kPackedBlock) {
      const std::size_t end = std::min(count, begin + kPackedBlock);
      float most = 0;
      for (std::size_t i = begin; i < end; ++i) most = std::max(most, std::abs(exact[i]));
      for (std::size_t i = begin; i < end; ++i) {
        CHECK(std::abs(back[i] - exact[i]) <= most / 254 * 1.0001F);
      }
    }
  }
}

TEST(packed_blocks_with_an_infinity_or_nan_are_nan) {
  for (const DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBfloat16}) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      const Tensor tensor = make_tensor(dtype, 700, [&](auto i) { return i == 300 ? bad : 1.0; });
      const std::vector<float> back = floats(packed_and_back(dtype, tensor), dtype);
      for (std::size_t i = 0; i < back.size(); ++i) {
        CHECK(i / 256 == 1 ? std::isnan(back[i]) : back[i] == 1.0F);
      }
    }
  }
}

TEST(packed_numbers_of_extreme_magnitude) {
  const auto back = [](float value) {
    const Tensor tensor = make_tensor(DataType::kFloat32, 3, [&](auto i) { return i * value; });
    return floats(packed_and_back(DataType::kFloat32, tensor))[2];
  };
  CHECK_EQ(back(0.0F), 0.0F);
  CHECK_EQ(back(0x1p-149F), 0.0F);
  CHECK_EQ(back(0x1p-122F), 0.0F);
  CHECK(std::abs(back(0x1p-120F) - 0x1p-119F) < 0x1p-140F);
  CHECK(std::abs(back(0x1p125F) - 0x1p126F) < 0x1p104F);
}

TEST(packed_numbers_are_alike_with_every_instruction_set) {
  const PackedLoops& best = best_packed_loops();
  std::mt19937_64 random(7);
  for (const std::size_t count : kPackedCounts) {
    std::vector<float> numbers(count);
    for (float& number : numbers) {
      number = std::ldexp(static_cast<float>(random() % 4097) - 2048.0F,
                          static_cast<int>(random() % 12) - 130 + static_cast<int>(random() % 200));
    }
    Tensor a(packed_bytes(count)), b(packed_bytes(count));
    best.pack(numbers.data(), count, a.data());
    portable::kPackedLoops.pack(numbers.data(), count, b.data());
    CHECK(a == b);
    const std::vector<const std::byte*> sources = {a.data(), b.data(), a.data()};
    const int counts[] = {3, 1, 2};
    best.sum(sources, count, {6, 0.3, counts}, a.data());
    std::vector<float> from_best(count), from_portable(count);
    best.unpack(a.data(), count, from_best.data());
    Tensor again = b;
    const std::vector<const std::byte*> same = {b.data(), b.data(), b.data()};
    portable::kPackedLoops.sum(same, count, {6, 0.3, counts}, again.data());
    portable::kPackedLoops.unpack(again.data(), count, from_portable.data());
    CHECK(a == again);
    if (count == 0) continue;
    CHECK(std::memcmp(from_best.data(), from_portable.data(), count * sizeof(float)) == 0);
  }
}

TEST(packed_allreduce_has_the_bits_of_the_reference_on_every_rank) {
  const std::vector<Hosts> worlds = {{0, 1},       {0, 1, 2},    {0, 0, 1},         {0, 0, 1, 1},
                                     {0, 1, 1, 0}, {0, 0, 0, 1}, {0, 1, 0, 2, 1, 0}};
  for (const Hosts& hosts : worlds) {
    for (const DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBfloat16}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
        const double postscale = op == ReduceOp::kSum ? 1.0 : 0.3;
        const std::vector<Tensor> expected = references(hosts, dtype, op, postscale);
        run_hosts(hosts, [&](int rank, Backend& backend, const Group& world) {
          check_bits(backend, world, rank, dtype, op, postscale, expected);
        });
      }
    }
  }
}

TEST(packed_tensors_and_others_in_one_batch_have_the_bits_that_each_has_alone) {
  for (const Hosts& hosts : {Hosts{0, 1}, Hosts{0, 1, 0, 2, 1, 0}}) {
    for (const DataType dtype : {DataType::kFloat32, DataType::kFloat16}) {
      const std::vector<Tensor> expected = references(hosts, dtype, ReduceOp::kAverage, 0.3);
      run_hosts(hosts, [&](int rank, Backend& backend, const Group& world) {
        std::vector<Tensor> mixed, exact;
        std::vector<Piece> pieces, exact_pieces;
        for (const std::size_t count : kPackedCounts) {
          mixed.push_back(input_of(dtype, rank, count));
          exact.push_back(mixed.back());
        }
        for (std::size_t i = 0; i < mixed.size(); ++i) {
          void* at = mixed[i].data();
          pieces.push_back(packed_piece(at, at, kPackedCounts[i], 0.3));
          pieces.back().packed = i % 3 != 0;
          exact_pieces.push_back({exact[i].data(), exact[i].data(), kPackedCounts[i], 1.0, 0.3});
        }
        CHECK_OK(backend.allreduce({world, dtype, ReduceOp::kAverage, pieces}, kPatience));
        CHECK_OK(backend.allreduce({world, dtype, ReduceOp::kAverage, exact_pieces}, kPatience));
        for (std::size_t i = 0; i < mixed.size(); ++i) {
          CHECK(mixed[i] == (i % 3 != 0 ? expected[i] : exact[i]));
        }
      });
    }
  }
}

TEST(packed_allreduce_of_gpus_on_several_hosts_goes_through_the_host) {
  const Hosts hosts = {0, 1, 1};
  const std::vector<Tensor> expected = references(hosts, DataType::kFloat32, ReduceOp::kSum, 1.0);
  for (const std::string nccl : {"libnccl.so.2", "nowhere"}) {
    run_gpus(
        hosts, gpu_config(),
        [&](int rank, Backend& backend, const Group& world) {
          check_bits(backend, world, rank, DataType::kFloat32, ReduceOp::kSum, 1.0, expected);
        },
        gpu_libraries(nccl));
  }
}

TEST(packed_allreduce_on_one_host_is_exact) {
  const EveryBody body = [](int size, int rank, Backend& backend, const Group& world) {
    std::vector<float> numbers(3000);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = static_cast<float>(value_of(rank, i)) + 0x1p-10F;
    }
    const Piece piece = packed_piece(numbers.data(), numbers.data(), numbers.size());
    CHECK_OK(
        backend.allreduce({world, DataType::kFloat32, ReduceOp::kSum, {&piece, 1}}, kPatience));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const double sum = expected(ReduceOp::kSum, size, i) + size * 0x1p-10;
      CHECK(numbers[i] == static_cast<float>(sum));
    }
  };
  for (const Hosts& hosts : {Hosts{0, 0}, Hosts{0, 0, 0, 0}}) {
    run_hosts(hosts, [&](int rank, Backend& backend, const Group& world) {
      body(static_cast<int>(hosts.size()), rank, backend, world);
    });
    run_gpus(
        hosts, gpu_config(),
        [&](int rank, Backend& backend, const Group& world) {
          body(static_cast<int>(hosts.size()), rank, backend, world);
        },
        gpu_libraries("libnccl.so.2"));
  }
  SelfBackend self;
  const ProcessSets alone(1);
  body(1, 0, self, *alone.get(0));
}

TEST(packed_allreduce_is_within_the_bound_of_each_block) {
  const Hosts hosts = {0, 0, 1, 2};
  run_hosts(hosts, [](int rank, Backend& backend, const Group& world) {
    constexpr std::size_t kCount = 9000;
    Tensor tensor = input_of(DataType::kFloat32, rank, kCount);
    const Piece piece = packed_piece(tensor.data(), tensor.data(), kCount);
    CHECK_OK(
        backend.allreduce({world, DataType::kFloat32, ReduceOp::kSum, {&piece, 1}}, kPatience));
    const std::vector<float> sums = floats(tensor);
    for (std::size_t begin = 0; begin < kCount; begin += kPackedBlock) {
      const std::size_t end = std::min(kCount, begin + kPackedBlock);
      double most[4] = {0, 0, 0, 0};  // of each host, and of the result
      const auto parts = [](std::size_t i) {
        return std::vector<double>{uneven_block(0, i) + uneven_block(1, i), uneven_block(2, i),
                                   uneven_block(3, i)};
      };
      for (std::size_t i = begin; i < end; ++i) {
        const std::vector<double> given = parts(i);
        for (int h = 0; h < 3; ++h) most[h] = std::max(most[h], std::abs(given[h]));
        most[3] = std::max<double>(most[3], std::abs(sums[i]));
      }
      const double bound = (most[0] + most[1] + most[2] + most[3]) / 254 * 1.0001;
      for (std::size_t i = begin; i < end; ++i) {
        const std::vector<double> given = parts(i);
        CHECK(std::abs(sums[i] - (given[0] + given[1] + given[2])) <= bound);
      }
    }
  });
}

TEST(packed_allreduce_tells_every_rank_of_an_infinity) {
  for (const Hosts& hosts : {Hosts{0, 1}, Hosts{0, 0, 1, 2}}) {
    for (const float bad : {INFINITY, NAN}) {
      for (int culprit = 0; culprit < static_cast<int>(hosts.size()); ++culprit) {
        run_hosts(hosts, [&](int rank, Backend& backend, const Group& world) {
          std::vector<float> numbers(1000, 1.0F);
          if (rank == culprit) numbers[600] = bad;
          const Piece piece = packed_piece(numbers.data(), numbers.data(), numbers.size());
          CHECK_OK(backend.allreduce({world, DataType::kFloat32, ReduceOp::kAverage, {&piece, 1}},
                                     kPatience));
          for (std::size_t i = 0; i < numbers.size(); ++i) {
            CHECK(i / 256 == 2 ? std::isnan(numbers[i]) : numbers[i] == 1.0F);
          }
        });
      }
    }
  }
}

namespace {

EntryPtr packed_entry(const std::string& name, std::vector<float>& values) {
  EntryPtr entry = allreduce_entry(name, values, ReduceOp::kAverage);
  entry->request.tensors[0].wire = DataType::kInt8;
  return entry;
}

}  // namespace

TEST(packed_tensors_share_a_batch_with_others_on_the_host_alone) {
  for (const DeviceType device : {DeviceType::kHost, DeviceType::kGpu}) {
    Round round = round_of({"a", "b", "c"}, 100);
    for (Agreed& agreed : round.entries) agreed.entry->request.tensors[0].device = device;
    round.entries[0].entry->request.tensors[0].wire = DataType::kInt8;
    round.entries[2].entry->request.tensors[0].wire = DataType::kInt8;
    const auto batches = plan_batches(round.entries, 4000);
    const bool on_host = device == DeviceType::kHost;
    CHECK_EQ(batches.size(), std::size_t{on_host ? 1U : 2U});
    CHECK_EQ(batches[0].tensors.size(), std::size_t{on_host ? 3U : 2U});
    CHECK(batches[0].types == ElementTypes(DataType::kFloat32));
    CHECK_EQ(batches[0].bytes, std::uint64_t{on_host ? 1200U : 800U});
  }
}

TEST(packed_tensors_are_agreed_upon_and_cost_a_quarter_of_the_bytes) {
  constexpr std::size_t kCount = 200000;
  run_world({0, 0, 1, 1}, [](int rank, Engine& engine) {
    std::uint64_t sent[2];
    for (const bool packed : {false, true}) {
      const std::uint64_t before = engine.counters().bytes_to_other_hosts.get();
      std::vector<float> values(kCount, static_cast<float>(rank));
      const std::string name = packed ? "packed" : "exact";
      CHECK_OK(run(engine, packed ? packed_entry(name, values)
                                  : allreduce_entry(name, values, ReduceOp::kAverage)));
      CHECK(std::abs(values[kCount - 1] - 1.5F) < 0.02F);
      sent[packed ? 1 : 0] = engine.counters().bytes_to_other_hosts.get() - before;
    }
    CHECK(sent[0] >= kCount * sizeof(float) / 2 - 64);
    CHECK(static_cast<double>(sent[1]) < 0.255 * static_cast<double>(sent[0]));
    std::vector<float> values(10, 1.0F);
    const Status status = run(engine, rank == 1 ? allreduce_entry("x", values, ReduceOp::kAverage)
                                                : packed_entry("x", values));
    CHECK_STATUS(status, StatusCode::kMismatch);
    // Rank 1 is compared with the one that came first, or is that one.
    CHECK(has(status.message(), "ranks disagree about the wire dtype: rank "));
    CHECK(has(status.message(), " has int8") && has(status.message(), "rank 1 has float32"));
    // A weighted average packs what a rank's share makes of its tensor.
    EntryPtr weighted = packed_entry("w", values);
    values.assign(10, static_cast<float>(rank));
    weighted->request.weighted = true;
    weighted->weight = rank;
    CHECK_OK(run(engine, weighted));
    CHECK(std::abs(values[9] - 14.0F / 6) < 0.03F);
  });
}

TEST(packed_tensors_are_refused_where_they_mean_nothing) {
  const ProcessSets sets(1);
  std::vector<float> values(4);
  const auto refusal = [&](const EntryPtr& entry) {
    return check_entry(*entry, sets.get(0), 0).message();
  };
  CHECK_EQ(refusal(packed_entry("x", values)), std::string());
  for (const ReduceOp op :
       {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kAdasum}) {
    EntryPtr entry = packed_entry("x", values);
    entry->request.op = op;
    CHECK(has(refusal(entry),
              "int8 between hosts goes with an allreduce by sum or average, not "
              "with allreduce by " +
                  std::string(name_of(op))));
  }
  EntryPtr scattered = packed_entry("x", values);
  scattered->request.kind = Kind::kReducescatter;
  CHECK(has(refusal(scattered), "not with reducescatter by average"));
  for (const DataType dtype : {DataType::kFloat64, DataType::kInt32, DataType::kComplex64}) {
    EntryPtr entry = packed_entry("x", values);
    entry->request.tensors[0].dtype = dtype;
    CHECK(has(refusal(entry), "'x', of dtype " + std::string(name_of(dtype)) +
                                  ", cannot travel as int8 between hosts"));
  }
}
