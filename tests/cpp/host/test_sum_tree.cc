#include <complex>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/reduce.h"
#include "kernels/sum_tree.h"
#include "sum_tree.h"

using namespace hvdlite;
using testing::by_host;
using testing::has;
using testing::parts_of;
using testing::RanksByHost;
using testing::sum_by_tree;

namespace {

using Hosts = std::vector<int>;

std::string blocks_of(const Hosts& hosts, int virtual_size) {
  const Result<std::vector<VirtualBlock>> blocks = virtual_blocks(hosts, virtual_size);
  if (!blocks.ok()) return blocks.status().message();
  std::string text;
  for (const VirtualBlock& block : blocks.value()) {
    text += std::to_string(block.first) + "+" + std::to_string(block.size) + " ";
  }
  return text;
}

// Shows the tree over hosts A, B... that the core makes.
std::string tree_of(const Hosts& ranks) {
  const std::vector<int> nodes = tree_over_hosts(ranks);
  std::size_t node = 0;
  char name = 'A';
  const auto show = [&](const auto& self, int hosts) -> std::string {
    if (hosts == 1) return std::string(1, name++);
    const int left = nodes.at(node++);
    const std::string first = self(self, left);
    return "(" + first + self(self, hosts - left) + ")";
  };
  std::string text = show(show, static_cast<int>(ranks.size()));
  CHECK_EQ(node, nodes.size());
  return text;
}

}  // namespace

TEST(sum_tree_over_hosts_is_that_of_the_reference) {
  for (unsigned code = 0; code < 4 * 4 * 4 * 4 * 4 * 4; ++code) {
    Hosts ranks;
    Hosts hosts;
    for (unsigned rest = code; rest > 0; rest /= 4) {
      if (rest % 4 == 0) continue;
      hosts.insert(hosts.end(), rest % 4, static_cast<int>(ranks.size()));
      ranks.push_back(static_cast<int>(rest % 4));
    }
    if (ranks.empty()) continue;
    const std::string expected = sum_by_tree(
        by_host(hosts), [](int) { return std::string("A"); },
        [](const std::string& a, const std::string& b) { return "(" + a + b + ")"; },
        [&](const std::vector<int>& of, const std::string&) {
          return std::string(1, static_cast<char>('A' + hosts[of[0]]));
        });
    if (ranks.size() > 1) CHECK_EQ(tree_of(ranks), expected);
  }
}

namespace {

// Reduces what each host gives, and compares with the reference. With one rank on each host, the
// kernel is also asked to find the tree itself.
template <typename T>
void check_kernel(DataType dtype, ReduceOp op, const Hosts& hosts) {
  constexpr std::size_t kCount = 1100;  // more than the kernel takes at once
  const RanksByHost ranks = by_host(hosts);
  Hosts sizes;
  for (const auto& host : ranks) sizes.push_back(static_cast<int>(host.size()));
  std::mt19937 random(static_cast<unsigned>(hosts.size()));
  std::uniform_real_distribution<float> number(-3, 3);
  std::vector<std::vector<T>> given(ranks.size(), std::vector<T>(kCount));
  std::vector<const void*> sources;
  for (auto& values : given) {
    for (T& value : values) {
      if constexpr (std::is_same_v<T, std::complex<float>>) {
        value = {number(random), number(random)};
      } else {
        value = static_cast<T>(number(random));
      }
    }
    sources.push_back(values.data());
  }
  std::vector<T> expected(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    expected[i] = sum_by_tree(
        ranks, [&](int rank) { return given[static_cast<std::size_t>(hosts[rank])][i]; },
        [&](T a, T b) {
          if (op == ReduceOp::kSum) return static_cast<T>(a + b);
          if constexpr (std::is_same_v<T, std::complex<float>>) {
            return T{a.real() * b.real() - a.imag() * b.imag(),
                     a.real() * b.imag() + a.imag() * b.real()};
          } else {
            return static_cast<T>(a * b);
          }
        },
        [&](const std::vector<int>& of, const T&) { return given[hosts[of[0]]][i]; });
  }
  const std::vector<int> nodes = tree_over_hosts(sizes);
  const bool halves = ranks.size() == hosts.size();
  for (const ReduceFunction variant : {best_reduce(), &portable::reduce_any}) {
    for (const int* tree : {nodes.data(), static_cast<const int*>(nullptr)}) {
      if (tree == nullptr && !halves) continue;
      std::vector<T> result(kCount);
      variant(dtype, op, sources, result.data(), kCount, {1, 1.0, nullptr, tree});
      CHECK(result == expected);
    }
  }
  reduce(dtype, op, sources, given.back().data(), kCount, {1, 1.0, nullptr, nodes.data()});
  CHECK(given.back() == expected);
}

}  // namespace

TEST(sum_tree_is_what_the_kernel_follows) {
  std::vector<Hosts> worlds = {{0, 0, 0, 0, 1, 1, 2, 2}, {0, 1, 1, 1, 1, 1, 2, 3, 3},
                               {0, 0, 0, 1, 2, 2},       {0, 1, 2, 3, 4, 4, 4, 4, 4},
                               {0, 1, 2, 2, 2},          {0, 0, 0, 0, 0, 1, 2, 3, 4}};
  for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8, 9, 19}) {
    worlds.emplace_back();
    for (int rank = 0; rank < ranks; ++rank) worlds.back().push_back(rank);
  }
  for (const Hosts& hosts : worlds) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct}) {
      check_kernel<float>(DataType::kFloat32, op, hosts);
      check_kernel<double>(DataType::kFloat64, op, hosts);
      check_kernel<std::complex<float>>(DataType::kComplex64, op, hosts);
      check_kernel<std::int8_t>(DataType::kInt8, op, hosts);
    }
  }
}

TEST(virtual_blocks_halve_along_the_tree) {
  CHECK_EQ(blocks_of({0}, 8), "0+8 ");
  CHECK_EQ(blocks_of({0, 0, 0}, 8), "0+2 2+2 4+4 ");
  CHECK_EQ(blocks_of(Hosts(5, 0), 8), "0+1 1+1 2+2 4+2 6+2 ");
  CHECK_EQ(blocks_of(Hosts(8, 3), 8), "0+1 1+1 2+1 3+1 4+1 5+1 6+1 7+1 ");
  CHECK_EQ(blocks_of({0, 0, 0, 0, 1, 1, 2, 2}, 8), blocks_of(Hosts(8, 0), 8));
  CHECK_EQ(blocks_of({0, 0, 1}, 4), "0+1 1+1 2+2 ");
  CHECK_EQ(blocks_of({1, 2, 1}, 4), "0+1 2+2 1+1 ");
}

TEST(virtual_blocks_need_a_power_of_two_that_is_large_enough) {
  CHECK(has(blocks_of({0, 0}, 0), "0 virtual ranks are not a power of two"));
  CHECK(has(blocks_of({0, 0}, 12), "12 virtual ranks are not a power of two"));
  CHECK(has(blocks_of({0, 0, 0}, 2), "2 virtual ranks are too few for 3 ranks"));
  CHECK(has(blocks_of({0, 0, 0, 1, 1, 1, 1, 1}, 8), "8 virtual ranks are too few for 8 ranks"));
  for (int ranks = 1; ranks <= 64; ++ranks) {
    int least = 1;
    while (least < ranks) least *= 2;
    CHECK(virtual_blocks(Hosts(static_cast<std::size_t>(ranks), 0), least).ok());
  }
}
