// One conformance suite for data planes: the same checks over every backend and every shape of
// world.
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "backend/fake_backend.h"
#include "backend/host_backend.h"
#include "backend/self_backend.h"
#include "base/half.h"
#include "check.h"
#include "engine/process_set.h"

using namespace hvdlite;
using namespace std::chrono_literals;

namespace {

constexpr Patience kPatience = 20s;
using Hosts = std::vector<int>;
using Body = std::function<void(int rank, Backend& backend, const Group& world)>;

Config small_config() {
  Config config;
  config.shm_chunk = 4096;  // so that small tests take many chunks
  config.tcp_chunk = 8192;
  config.shm_small = 512;
  return config;
}

// Runs the body on a thread per rank, each with a host backend.
void run_hosts(const Hosts& hosts, const Body& body) {
  const Config config = small_config();
  auto fabrics = make_inproc_world(hosts, config);
  CHECK_OK(fabrics.status());
  const ProcessSets sets(static_cast<int>(hosts.size()));
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    threads.emplace_back([&, rank] {
      HostBackend backend(*fabrics.value()[rank], config);
      body(static_cast<int>(rank), backend, *sets.get(0));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Every backend, and every shape of world that the host backend treats differently.
void for_every_world(const std::function<void(int size, int rank, Backend&, const Group&)>& body) {
  SelfBackend self;
  const ProcessSets alone(1);
  body(1, 0, self, *alone.get(0));
  std::vector<std::string> calls;
  const Status fine;
  FakeBackend fake(calls, fine);
  body(1, 0, fake, *alone.get(0));
  const std::vector<Hosts> worlds = {
      {0},          {0, 0},       {0, 0, 0},    {0, 0, 0, 0, 0, 0, 0, 0}, {0, 1}, {0, 1, 2},
      {0, 0, 1, 1}, {0, 1, 1, 0}, {0, 0, 0, 1}, {0, 1, 0, 2, 1, 0}};
  for (const Hosts& hosts : worlds) {
    run_hosts(hosts, [&](int rank, Backend& backend, const Group& world) {
      body(static_cast<int>(hosts.size()), rank, backend, world);
    });
  }
}

double value_of(int rank, std::size_t i) { return static_cast<double>((rank * 7 + i) % 11) - 3; }

double expected(ReduceOp op, int size, std::size_t i) {
  double total = value_of(0, i);
  for (int rank = 1; rank < size; ++rank) {
    const double value = value_of(rank, i);
    if (op == ReduceOp::kMin) total = std::min(total, value);
    if (op == ReduceOp::kMax) total = std::max(total, value);
    if (op == ReduceOp::kSum) total += value;
  }
  return total;
}

void store(DataType dtype, std::byte* at, double value) {
  const auto put = [&](auto typed) { std::memcpy(at, &typed, sizeof typed); };
  switch (dtype) {
    case DataType::kFloat16:
      return put(to_float16(static_cast<float>(value)).bits);
    case DataType::kBfloat16:
      return put(to_bfloat16(static_cast<float>(value)).bits);
    case DataType::kFloat32:
      return put(static_cast<float>(value));
    case DataType::kFloat64:
      return put(value);
    default:
      break;
  }
  const auto whole = static_cast<std::int64_t>(value);
  std::memcpy(at, &whole, size_of(dtype));  // little-endian: the low bytes
}

std::vector<std::byte> make_tensor(DataType dtype, std::size_t count,
                                   const std::function<double(std::size_t)>& value) {
  std::vector<std::byte> bytes(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) store(dtype, bytes.data() + i * size_of(dtype), value(i));
  return bytes;
}

}  // namespace

TEST(backends_reduce_every_dtype_op_and_length) {
  for_every_world([](int size, int rank, Backend& backend, const Group& world) {
    for (int dtype = 0; dtype < kDataTypeCount - 1; ++dtype) {
      const auto type = static_cast<DataType>(dtype);
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
        if (type == DataType::kUint8 && op != ReduceOp::kSum) continue;  // negative values wrap
        for (const std::size_t count : {0, 1, 7, 300, 5003}) {
          auto tensor = make_tensor(type, count, [&](auto i) { return value_of(rank, i); });
          const Piece piece{tensor.data(), tensor.data(), count};
          CHECK_OK(backend.allreduce(world, type, op, {&piece, 1}, kPatience));
          CHECK(tensor == make_tensor(type, count, [&](auto i) { return expected(op, size, i); }));
        }
      }
    }
  });
}

TEST(backends_average_and_scale) {
  for_every_world([](int size, int rank, Backend& backend, const Group& world) {
    std::vector<float> values(3000, static_cast<float>(rank));
    std::vector<float> results(3000);
    const Piece piece{values.data(), results.data(), values.size(), 4.0, 0.5};
    CHECK_OK(
        backend.allreduce(world, DataType::kFloat32, ReduceOp::kAverage, {&piece, 1}, kPatience));
    CHECK_EQ(results[2999], static_cast<float>(size - 1));  // 0.5 * 4 * (size - 1) / 2
    CHECK_EQ(values[2999], static_cast<float>(rank));
  });
}

TEST(backends_give_the_same_bits_however_tensors_are_batched) {
  for_every_world([](int, int rank, Backend& backend, const Group& world) {
    std::vector<std::vector<float>> together;
    for (const std::size_t count : {5, 3000, 1, 0, 700}) {
      together.emplace_back(count);
      for (std::size_t i = 0; i < count; ++i) {
        together.back()[i] =
            std::sin(static_cast<float>(i + 1)) * (static_cast<float>(rank) + 0.1f);
      }
    }
    auto apart = together;
    std::vector<Piece> pieces;
    for (auto& tensor : together) pieces.push_back({tensor.data(), tensor.data(), tensor.size()});
    CHECK_OK(backend.allreduce(world, DataType::kFloat32, ReduceOp::kSum, pieces, kPatience));
    for (auto& tensor : apart) {
      const Piece piece{tensor.data(), tensor.data(), tensor.size()};
      CHECK_OK(
          backend.allreduce(world, DataType::kFloat32, ReduceOp::kSum, {&piece, 1}, kPatience));
    }
    CHECK(together == apart);
  });
}

TEST(backends_gather_blocks_of_any_length) {
  for_every_world([](int size, int rank, Backend& backend, const Group& world) {
    for (const std::size_t unit : {0, 1, 5000}) {
      std::vector<std::size_t> bytes(size);
      std::size_t total = 0;
      for (int r = 0; r < size; ++r) total += bytes[r] = unit * static_cast<std::size_t>(r % 3);
      const std::vector<std::byte> input(bytes[rank], static_cast<std::byte>(rank + 1));
      std::vector<std::byte> output(total);
      CHECK_OK(backend.allgather(world, input, bytes, output, kPatience));
      std::size_t at = 0;
      for (int r = 0; r < size; ++r) {
        for (std::size_t i = 0; i < bytes[r]; ++i) {
          CHECK(output[at + i] == static_cast<std::byte>(r + 1));
        }
        at += bytes[r];
      }
    }
  });
}

TEST(backends_broadcast_from_every_root) {
  for_every_world([](int size, int rank, Backend& backend, const Group& world) {
    for (int root = 0; root < size; ++root) {
      std::vector<std::byte> data(20000, static_cast<std::byte>(rank == root ? root + 1 : 0));
      CHECK_OK(backend.broadcast(world, root, data, data, kPatience));
      CHECK(data.back() == static_cast<std::byte>(root + 1));
    }
  });
}

TEST(backends_barrier_holds_everybody_back) {
  std::atomic<int> arrived{0};
  run_hosts({0, 0, 1, 2, 1}, [&](int rank, Backend& backend, const Group& world) {
    for (int step = 1; step <= 20; ++step) {
      if (rank == step % 5) std::this_thread::sleep_for(1ms);
      arrived.fetch_add(1);
      CHECK_OK(backend.barrier(world, kPatience));
      CHECK(arrived.load() >= 5 * step);
      CHECK_OK(backend.barrier(world, kPatience));
    }
  });
}

TEST(backends_interleave_process_sets_over_the_same_slots) {
  ProcessSets sets(3);
  CHECK_OK(sets.add({0, 1}).status());
  CHECK_OK(sets.add({1, 2}).status());
  run_hosts({0, 0, 0}, [&](int rank, Backend& backend, const Group& world) {
    for (int step = 0; step < 100; ++step) {
      for (std::uint32_t id = 0; id < 3; ++id) {
        const Group& group = id == 0 ? world : *sets.get(id);
        if (group.index_of(rank) < 0) continue;
        std::vector<float> values(step % 2 == 0 ? 10 : 3000, static_cast<float>(rank + step));
        const Piece piece{values.data(), values.data(), values.size()};
        CHECK_OK(
            backend.allreduce(group, DataType::kFloat32, ReduceOp::kSum, {&piece, 1}, kPatience));
        float sum = 0;
        for (const int member : group.ranks) sum += static_cast<float>(member + step);
        CHECK_EQ(values.back(), sum);
      }
    }
  });
}

TEST(backends_interleave_process_sets_and_collectives_across_hosts) {
  ProcessSets sets(5);
  CHECK_OK(sets.add({0, 3}).status());     // one rank of each of two hosts
  CHECK_OK(sets.add({1, 2, 4}).status());  // two of one host, one of another
  CHECK_OK(sets.add({3}).status());
  run_hosts({0, 0, 0, 1, 1}, [&](int rank, Backend& backend, const Group& world) {
    for (int step = 0; step < 30; ++step) {
      for (std::uint32_t id = 0; id < 4; ++id) {
        const Group& group = id == 0 ? world : *sets.get(id);
        if (group.index_of(rank) < 0) continue;
        const int root = group.ranks[static_cast<std::size_t>(step) % group.ranks.size()];
        std::vector<std::byte> data(9000, static_cast<std::byte>(rank == root ? step + 1 : 0));
        CHECK_OK(backend.broadcast(group, root, data, data, kPatience));
        CHECK(data.front() == static_cast<std::byte>(step + 1));
        CHECK(data.back() == static_cast<std::byte>(step + 1));

        std::vector<double> values(3000, rank + 0.5);
        const Piece piece{values.data(), values.data(), values.size()};
        CHECK_OK(
            backend.allreduce(group, DataType::kFloat64, ReduceOp::kMax, {&piece, 1}, kPatience));
        CHECK_EQ(values.front(), group.ranks.back() + 0.5);
        CHECK_EQ(values.back(), group.ranks.back() + 0.5);

        const std::vector<std::byte> own(7, static_cast<std::byte>(rank));
        const std::vector<std::size_t> bytes(group.ranks.size(), own.size());
        std::vector<std::byte> gathered(own.size() * group.ranks.size());
        CHECK_OK(backend.allgather(group, own, bytes, gathered, kPatience));
        CHECK(gathered.back() == static_cast<std::byte>(group.ranks.back()));
        CHECK_OK(backend.barrier(group, kPatience));
      }
    }
  });
}

TEST(backends_notice_a_lost_rank_in_every_collective) {
  using Call = std::function<Status(Backend&, const Group&)>;
  std::vector<std::byte> data(9000);
  std::vector<std::byte> gathered(27000);
  const std::vector<std::size_t> bytes(3, data.size());
  const std::vector<Call> calls = {
      [&](Backend& b, const Group& g) { return b.barrier(g, kPatience); },
      [&](Backend& b, const Group& g) { return b.broadcast(g, 1, data, data, kPatience); },
      [&](Backend& b, const Group& g) { return b.allgather(g, data, bytes, gathered, kPatience); }};
  const ProcessSets sets(3);
  for (const Hosts& hosts : {Hosts{0, 0, 0}, Hosts{0, 1, 1}}) {
    for (const Call& call : calls) {
      const Config config = small_config();
      auto fabrics = make_inproc_world(hosts, config);
      CHECK_OK(fabrics.status());
      std::thread leaver([&] {
        std::this_thread::sleep_for(20ms);
        fabrics.value()[1]->close();
      });
      HostBackend backend(*fabrics.value()[0], config);
      const auto begin = std::chrono::steady_clock::now();
      const Status status = call(backend, *sets.get(0));
      CHECK_STATUS(status, StatusCode::kRankFailed);
      CHECK_EQ(status.failed_rank(), 1);
      CHECK(std::chrono::steady_clock::now() - begin < 1s);
      leaver.join();
    }
  }
}

TEST(backends_name_the_rank_that_makes_no_progress) {
  for (const Hosts& hosts : {Hosts{0, 0}, Hosts{0, 1}}) {
    run_hosts(hosts, [](int rank, Backend& backend, const Group& world) {
      if (rank == 1) return;
      std::vector<float> values(10);
      const Piece piece{values.data(), values.data(), values.size()};
      const Status status =
          backend.allreduce(world, DataType::kFloat32, ReduceOp::kSum, {&piece, 1}, 50ms);
      CHECK_STATUS(status, StatusCode::kTimeout);
      CHECK_EQ(status.failed_rank(), 1);
    });
  }
}

TEST(backends_notice_a_lost_rank_at_once) {
  for (const Hosts& hosts : {Hosts{0, 0, 0}, Hosts{0, 1, 1}}) {
    const Config config = small_config();
    auto fabrics = make_inproc_world(hosts, config);
    CHECK_OK(fabrics.status());
    const ProcessSets sets(3);
    std::thread leaver([&] {
      std::this_thread::sleep_for(50ms);
      fabrics.value()[1]->close();
    });
    HostBackend backend(*fabrics.value()[0], config);
    std::vector<float> values(5000);
    const Piece piece{values.data(), values.data(), values.size()};
    const auto begin = std::chrono::steady_clock::now();
    const Status status =
        backend.allreduce(*sets.get(0), DataType::kFloat32, ReduceOp::kSum, {&piece, 1}, kPatience);
    CHECK_STATUS(status, StatusCode::kRankFailed);
    CHECK_EQ(status.failed_rank(), 1);
    CHECK(std::chrono::steady_clock::now() - begin < 1s);
    leaver.join();
  }
}

TEST(backends_fake_fails_on_demand_and_records) {
  std::vector<std::string> calls;
  const Status failure(StatusCode::kRankFailed, "on demand", 3);
  FakeBackend fake(calls, failure);
  const ProcessSets sets(1);
  float value = 1;
  const Piece piece{&value, &value, 1};
  CHECK_STATUS(
      fake.allreduce(*sets.get(0), DataType::kFloat32, ReduceOp::kMax, {&piece, 1}, kPatience),
      StatusCode::kRankFailed);
  CHECK_STATUS(fake.barrier(*sets.get(0), kPatience), StatusCode::kRankFailed);
  CHECK_EQ(calls.at(0), std::string("allreduce of 1 float32 by max"));
  CHECK_EQ(calls.at(1), std::string("barrier"));
}
