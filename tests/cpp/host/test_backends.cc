// One conformance suite for data planes: the same checks over every backend and every shape of
// world.
#include <algorithm>
#include <cmath>
#include <complex>
#include <numeric>
#include <thread>
#include <vector>

#include "backend_worlds.h"
#include "check.h"
#include "support/inproc_world.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

TEST(backends_reduce_every_dtype_op_and_length) {
  for_every_world([](int size, int rank, Backend& backend, const Group& world) {
    for (const DataType type : reducible_types()) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
        if (!has_expected(type, op)) continue;
        for (const std::size_t count : {0, 1, 7, 300, 5003}) {
          auto tensor = make_tensor(type, count, [&](auto i) { return value_of(rank, i); });
          const Piece piece{tensor.data(), tensor.data(), count};
          CHECK_OK(backend.allreduce({world, type, op, {&piece, 1}}, kPatience));
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
        backend.allreduce({world, DataType::kFloat32, ReduceOp::kAverage, {&piece, 1}}, kPatience));
    CHECK_EQ(results[2999], static_cast<float>(size - 1));  // 0.5 * 4 * (size - 1) / 2
    CHECK_EQ(values[2999], static_cast<float>(rank));
  });
}

namespace {

using Complex = std::complex<float>;

// Gaussian integers, whose products are exact in any order.
Complex complex_of(int rank, std::size_t i) {
  constexpr Complex kValues[] = {{1, 0}, {0, 1}, {1, 1}, {-1, 0}, {1, -1}};
  return kValues[(static_cast<std::size_t>(rank) + i) % std::size(kValues)];
}

std::vector<Complex> expected_complex(ReduceOp op, int size, std::size_t count) {
  std::vector<Complex> results(count);
  for (std::size_t i = 0; i < count; ++i) {
    Complex total = 2.0f * complex_of(0, i);
    for (int rank = 1; rank < size; ++rank) {
      const Complex value = 2.0f * complex_of(rank, i);
      total = op == ReduceOp::kProduct ? total * value : total + value;
    }
    if (op == ReduceOp::kAverage) total /= static_cast<float>(size);
    results[i] = 0.5f * total;
  }
  return results;
}

}  // namespace

TEST(backends_sum_average_multiply_and_scale_complex_numbers) {
  for_every_world([](int size, int rank, Backend& backend, const Group& world) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kProduct}) {
      std::vector<Complex> values(3001);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = complex_of(rank, i);
      auto result = values;
      std::vector<Piece> pieces;
      for (const auto& [begin, count] : {std::pair{0, 1}, {1, 0}, {1, 3000}}) {
        pieces.push_back({values.data() + begin, result.data() + begin,
                          static_cast<std::size_t>(count), 2.0, 0.5});
      }
      CHECK_OK(backend.allreduce({world, DataType::kComplex64, op, pieces}, kPatience));
      const auto expected = expected_complex(op, size, values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        CHECK(std::abs(result[i] - expected[i]) <= 1e-6f * std::abs(expected[i]));
      }
    }
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
      CHECK_OK(backend.allgather({world, input, bytes, output}, kPatience));
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

// Little goes from each host to all others, and much around a ring of hosts.
TEST(backends_gather_several_tensors_at_once) {
  for_every_host_world([](int size, int rank, Backend& backend, const Group& world) {
    for (const std::size_t scale : {1, 300, 70000}) {
      std::vector<std::vector<std::size_t>> bytes;
      std::vector<std::vector<std::byte>> inputs;
      std::vector<std::vector<std::byte>> outputs;
      std::vector<Allgather> calls;
      const auto value = [](int r, std::size_t tensor, std::size_t i) {
        return static_cast<std::byte>(31 * r + 7 * static_cast<int>(tensor) + i % 251);
      };
      for (std::size_t tensor = 0; tensor < 3; ++tensor) {
        bytes.emplace_back();
        for (int r = 0; r < size; ++r) bytes[tensor].push_back((r + tensor) % 3 * scale);
        inputs.emplace_back(bytes[tensor][rank]);
        for (std::size_t i = 0; i < inputs[tensor].size(); ++i) {
          inputs[tensor][i] = value(rank, tensor, i);
        }
        outputs.emplace_back(std::accumulate(bytes[tensor].begin(), bytes[tensor].end(), 0UL));
      }
      for (std::size_t t = 0; t < 3; ++t) calls.push_back({world, inputs[t], bytes[t], outputs[t]});
      CHECK_OK(backend.allgathers(calls, kPatience));
      for (std::size_t tensor = 0; tensor < 3; ++tensor) {
        std::size_t at = 0;
        bool right = true;
        for (int r = 0; r < size; ++r) {
          for (std::size_t i = 0; i < bytes[tensor][r]; ++i) {
            right = right && outputs[tensor][at + i] == value(r, tensor, i);
          }
          at += bytes[tensor][r];
        }
        CHECK(right);
      }
    }
  });
}

// Long runs travel from tensor to tensor, short ones and scaled ones through a buffer, and ranks
// need not do the same.
TEST(backends_reduce_long_tensors_beside_scaled_ones) {
  for_every_host_world([](int size, int rank, Backend& backend, const Group& world) {
    for (const double factor : {1.0, 2.0}) {
      std::vector<std::vector<float>> data;
      std::vector<Piece> pieces;
      for (const std::size_t count : {20000, 3, 40000}) {
        data.emplace_back(count, static_cast<float>(rank + 1));
        const double own = rank == 0 ? factor : 1.0;
        pieces.push_back({data.back().data(), data.back().data(), count, own, 1.0, true});
      }
      CHECK_OK(backend.allreduce({world, DataType::kFloat32, ReduceOp::kSum, pieces}, kPatience));
      const auto sum = static_cast<float>(size * (size + 1) / 2 + factor - 1);
      for (const std::vector<float>& tensor : data) {
        CHECK(std::all_of(tensor.begin(), tensor.end(), [&](float x) { return x == sum; }));
      }
    }
  });
}

TEST(backends_broadcast_from_every_root) {
  for_every_world([](int size, int rank, Backend& backend, const Group& world) {
    for (int root = 0; root < size; ++root) {
      std::vector<std::byte> data(20000, static_cast<std::byte>(rank == root ? root + 1 : 0));
      CHECK_OK(backend.broadcast({world, root, data, data}, kPatience));
      CHECK(data.back() == static_cast<std::byte>(root + 1));
    }
  });
}

TEST(backends_transfer_between_every_two_ranks_both_ways) {
  for_every_host_world([](int size, int rank, Backend& backend, const Group&) {
    for (int low = 0; low < size; ++low) {
      for (int high = low + 1; high < size; ++high) {
        if (rank != low && rank != high) continue;
        const int peer = rank == low ? high : low;
        for (const std::size_t bytes : {0, 1, 5000, 700001}) {
          const std::vector<std::byte> out(bytes, static_cast<std::byte>(rank + 1));
          std::vector<std::byte> in(bytes);
          const Transfer both{peer, out, in};
          CHECK_OK(backend.transfer({&both, 1}, kPatience));
          CHECK(in == std::vector<std::byte>(bytes, static_cast<std::byte>(peer + 1)));
          const Transfer one_way = rank == low ? Transfer{peer, out, {}} : Transfer{peer, {}, in};
          CHECK_OK(backend.transfer({&one_way, 1}, kPatience));
          if (rank == high)
            CHECK(in == std::vector<std::byte>(bytes, static_cast<std::byte>(low + 1)));
        }
      }
    }
  });
}

TEST(backends_of_hosts_move_transfers_with_one_rank_in_order_however_they_are_cut) {
  for (const Hosts& hosts : {Hosts{0, 0, 0}, Hosts{0, 1, 2}}) {
    run_hosts(hosts, [](int rank, Backend& backend, const Group&) {
      constexpr int kEach = 12;
      std::vector<std::vector<std::byte>> memory;
      memory.reserve(4 * kEach);  // transfers point into it
      std::vector<Transfer> transfers;
      for (int i = 0; i < kEach; ++i) {
        for (int peer = 0; peer < 3; ++peer) {
          if (peer == rank) continue;
          const std::size_t bytes = static_cast<std::size_t>(i % 4) * 100000 + 3;
          auto& out = memory.emplace_back(bytes, static_cast<std::byte>(10 * i + rank));
          auto& in = memory.emplace_back(bytes);
          transfers.push_back({peer, out, in});
        }
      }
      // Rank r makes calls of r + 1 rounds each.
      const auto round = static_cast<std::size_t>(2 * (rank + 1));
      for (std::size_t at = 0; at < transfers.size(); at += round) {
        const std::size_t count = std::min(round, transfers.size() - at);
        CHECK_OK(backend.transfer(std::span(transfers).subspan(at, count), kPatience));
      }
      for (std::size_t i = 0; i < transfers.size(); ++i) {
        const auto expected = static_cast<std::byte>(10 * (i / 2) + transfers[i].rank);
        CHECK(transfers[i].incoming.front() == expected);
        CHECK(transfers[i].incoming.back() == expected);
      }
    });
  }
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

TEST(backends_interleave_process_sets_and_collectives_across_hosts) {
  ProcessSets sets(5);
  sets.add(1, {0, 3});     // one rank of each of two hosts
  sets.add(2, {1, 2, 4});  // two of one host, one of another
  sets.add(3, {3});
  run_hosts({0, 0, 0, 1, 1}, [&](int rank, Backend& backend, const Group& world) {
    for (int step = 0; step < 30; ++step) {
      for (std::uint32_t id = 0; id < 4; ++id) {
        const Group& group = id == 0 ? world : *sets.get(id);
        if (group.index_of(rank) < 0) continue;
        const int root = group.ranks[static_cast<std::size_t>(step) % group.ranks.size()];
        std::vector<std::byte> data(9000, static_cast<std::byte>(rank == root ? step + 1 : 0));
        CHECK_OK(backend.broadcast({group, root, data, data}, kPatience));
        CHECK(data.front() == static_cast<std::byte>(step + 1));
        CHECK(data.back() == static_cast<std::byte>(step + 1));

        std::vector<double> values(3000, rank + 0.5);
        const Piece piece{values.data(), values.data(), values.size()};
        CHECK_OK(
            backend.allreduce({group, DataType::kFloat64, ReduceOp::kMax, {&piece, 1}}, kPatience));
        CHECK_EQ(values.front(), group.ranks.back() + 0.5);
        CHECK_EQ(values.back(), group.ranks.back() + 0.5);

        const std::vector<std::byte> own(7, static_cast<std::byte>(rank));
        const std::vector<std::size_t> bytes(group.ranks.size(), own.size());
        std::vector<std::byte> gathered(own.size() * group.ranks.size());
        CHECK_OK(backend.allgather({group, own, bytes, gathered}, kPatience));
        CHECK(gathered.back() == static_cast<std::byte>(group.ranks.back()));

        const std::vector<std::uint64_t> counts(group.ranks.size(), 700);
        std::vector<double> whole(700 * counts.size(), rank + step);
        std::vector<double> block(700);
        const Piece scattered{whole.data(), block.data(), whole.size()};
        CHECK_OK(backend.reducescatter(
            {group, DataType::kFloat64, ReduceOp::kMax, scattered, counts}, kPatience));
        CHECK_EQ(block.front(), group.ranks.back() + step);
        CHECK_EQ(block.back(), group.ranks.back() + step);

        const std::vector<std::size_t> parts(group.ranks.size(), 3000);
        const std::vector<std::byte> sent(3000 * parts.size(), static_cast<std::byte>(rank));
        std::vector<std::byte> swapped(sent.size());
        CHECK_OK(backend.alltoall({group, sent, parts, swapped, parts}, kPatience));
        CHECK(swapped.front() == static_cast<std::byte>(group.ranks.front()));
        CHECK(swapped.back() == static_cast<std::byte>(group.ranks.back()));
        CHECK_OK(backend.barrier(group, kPatience));
      }
    }
  });
}

TEST(backends_notice_a_lost_rank_in_every_collective) {
  using Call = std::function<Status(Backend&, const Group&)>;
  std::vector<std::byte> data(9000);
  std::vector<std::byte> gathered(27000);
  std::vector<std::byte> swapped(27000);
  const std::vector<std::size_t> bytes(3, data.size());
  const std::vector<std::uint64_t> counts(3, data.size());
  const std::vector<Call> calls = {
      [&](Backend& b, const Group& g) { return b.barrier(g, kPatience); },
      [&](Backend& b, const Group& g) {
        const Piece piece{data.data(), data.data(), data.size()};
        return b.allreduce({g, DataType::kUint8, ReduceOp::kSum, {&piece, 1}}, kPatience);
      },
      [&](Backend& b, const Group& g) { return b.broadcast({g, 1, data, data}, kPatience); },
      [&](Backend& b, const Group&) {
        const Transfer from_lost{1, {}, data};
        return b.transfer({&from_lost, 1}, kPatience);
      },
      [&](Backend& b, const Group& g) {
        return b.allgather({g, data, bytes, gathered}, kPatience);
      },
      [&](Backend& b, const Group& g) {
        const Piece piece{gathered.data(), data.data(), gathered.size()};
        return b.reducescatter({g, DataType::kUint8, ReduceOp::kSum, piece, counts}, kPatience);
      },
      [&](Backend& b, const Group& g) {
        return b.alltoall({g, gathered, bytes, swapped, bytes}, kPatience);
      }};
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
          backend.allreduce({world, DataType::kFloat32, ReduceOp::kSum, {&piece, 1}}, 50ms);
      CHECK_STATUS(status, StatusCode::kTimeout);
      CHECK_EQ(status.failed_rank(), 1);
    });
  }
}

namespace {

// Blocks of a reduce-scatter: nothing, one element each, uneven with empty ones, many chunks.
std::vector<std::vector<std::uint64_t>> block_tables(int size) {
  std::vector<std::vector<std::uint64_t>> tables(4);
  for (int r = 0; r < size; ++r) {
    const auto rank = static_cast<std::uint64_t>(r);
    tables[0].push_back(0);
    tables[1].push_back(1);
    tables[2].push_back(rank % 3 * 70 + (rank == 0 ? 3 : 0));
    tables[3].push_back(3001 - 500 * (rank % 4));
  }
  return tables;
}

std::uint64_t sum(const std::vector<std::uint64_t>& counts, int members) {
  return std::accumulate(counts.begin(), counts.begin() + members, std::uint64_t{0});
}

// The number of bytes that `from` sends to `to`; some pairs send nothing.
std::size_t part_bytes(int from, int to, std::size_t unit) {
  return unit * static_cast<std::size_t>((from * 5 + to * 3) % 4);
}

std::byte part_byte(int from, int to, std::size_t i) {
  return static_cast<std::byte>(from * 31 + to * 7 + static_cast<int>(i % 13));
}

}  // namespace

TEST(backends_reduce_and_scatter_every_dtype_op_and_block) {
  for_every_world([](int size, int rank, Backend& backend, const Group& world) {
    for (const DataType type : reducible_types()) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
        if (!has_expected(type, op)) continue;
        for (const auto& counts : block_tables(size)) {
          const std::uint64_t all = sum(counts, size);
          const auto input = make_tensor(type, all, [&](auto i) { return value_of(rank, i); });
          std::vector<std::byte> output(counts[rank] * size_of(type));
          const Piece piece{input.data(), output.data(), all};
          CHECK_OK(backend.reducescatter({world, type, op, piece, counts}, kPatience));
          const std::uint64_t begin = sum(counts, rank);
          CHECK(output == make_tensor(type, counts[rank],
                                      [&](auto i) { return expected(op, size, begin + i); }));
        }
      }
    }
  });
}

TEST(backends_reducescatter_gives_the_bits_of_an_allreduce) {
  for_every_host_world([](int size, int rank, Backend& backend, const Group& world) {
    for (const DataType type : {DataType::kFloat32, DataType::kFloat16, DataType::kBfloat16}) {
      for (const ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kProduct}) {
        for (const auto& counts : block_tables(size)) {
          const std::uint64_t all = sum(counts, size);
          const auto input = make_tensor(type, all, [&](auto i) {
            return std::sin(static_cast<double>(i + 1)) * (rank + 0.1);
          });
          std::vector<std::byte> whole(input.size());
          const Piece reduced{input.data(), whole.data(), all, 0.3, 1.7};
          CHECK_OK(backend.allreduce({world, type, op, {&reduced, 1}}, kPatience));
          std::vector<std::byte> block(counts[rank] * size_of(type));
          const Piece piece{input.data(), block.data(), all, 0.3, 1.7};
          CHECK_OK(backend.reducescatter({world, type, op, piece, counts}, kPatience));
          const auto begin = static_cast<std::ptrdiff_t>(sum(counts, rank) * size_of(type));
          CHECK(std::equal(block.begin(), block.end(), whole.begin() + begin));
        }
      }
    }
  });
}

TEST(backends_exchange_parts_of_any_length) {
  for_every_world([](int size, int rank, Backend& backend, const Group& world) {
    for (const std::size_t unit : {0, 1, 300, 5001}) {
      std::vector<std::size_t> sent;
      std::vector<std::size_t> received;
      std::vector<std::byte> input;
      std::vector<std::byte> wanted;
      for (int peer = 0; peer < size; ++peer) {
        sent.push_back(part_bytes(rank, peer, unit));
        received.push_back(part_bytes(peer, rank, unit));
        for (std::size_t i = 0; i < sent.back(); ++i) input.push_back(part_byte(rank, peer, i));
        for (std::size_t i = 0; i < received.back(); ++i) {
          wanted.push_back(part_byte(peer, rank, i));
        }
      }
      std::vector<std::byte> output(wanted.size());
      CHECK_OK(backend.alltoall({world, input, sent, output, received}, kPatience));
      CHECK(output == wanted);
    }
  });
}
