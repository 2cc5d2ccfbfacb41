// The conformance suite's part on collectives that give every member something of its own.
#include <numeric>
#include <vector>

#include "backend_worlds.h"
#include "check.h"

using namespace hvdlite;
using namespace hvdlite::testing;

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
