// What tests expect of the tree by which ranks are summed (kernels/sum_tree.h), written as it is
// defined, without the code that it checks.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <utility>
#include <vector>

namespace hvdlite::testing {

using RanksByHost = std::vector<std::vector<int>>;  // hosts in order of their lowest rank

// Where the nodes of a tree over these hosts' ranks are cut: `first` of the hosts go to the left
// or, of a single host, its ranks.
inline std::size_t cut_of(const RanksByHost& hosts) {
  if (hosts.size() == 1) return (hosts[0].size() + 1) / 2;
  std::size_t ranks = 0;
  for (const auto& host : hosts) ranks += host.size();
  const auto distance = [&](std::size_t cut) {
    std::size_t left = 0;
    for (std::size_t h = 0; h < cut; ++h) left += hosts[h].size();
    return std::abs(static_cast<long>(left) - static_cast<long>((ranks + 1) / 2));
  };
  std::size_t best = 1;
  for (std::size_t cut = 2; cut < hosts.size(); ++cut) {
    if (distance(cut) <= distance(best)) best = cut;
  }
  return best;
}

// Returns both parts of a node of more than one rank.
inline std::pair<RanksByHost, RanksByHost> parts_of(const RanksByHost& hosts) {
  const auto cut = static_cast<std::ptrdiff_t>(cut_of(hosts));
  if (hosts.size() > 1) {
    return {{hosts.begin(), hosts.begin() + cut}, {hosts.begin() + cut, hosts.end()}};
  }
  const std::vector<int>& ranks = hosts[0];
  return {{{ranks.begin(), ranks.begin() + cut}}, {{ranks.begin() + cut, ranks.end()}}};
}

// Combines leaf(rank) of all ranks by the tree. What the ranks of one host make goes through
// of_host(ranks, value), where there are several hosts.
template <typename Leaf, typename Combine, typename OfHost>
auto sum_by_tree(const RanksByHost& hosts, const Leaf& leaf, const Combine& combine,
                 const OfHost& of_host) -> decltype(leaf(0)) {
  const auto within = [&](const auto& self, const std::vector<int>& ranks) -> decltype(leaf(0)) {
    if (ranks.size() == 1) return leaf(ranks[0]);
    const auto [left, right] = parts_of({ranks});
    return combine(self(self, left[0]), self(self, right[0]));
  };
  const auto across = [&](const auto& self, const RanksByHost& node) -> decltype(leaf(0)) {
    if (node.size() == 1) return of_host(node[0], within(within, node[0]));
    const auto [left, right] = parts_of(node);
    return combine(self(self, left), self(self, right));
  };
  return hosts.size() == 1 ? within(within, hosts[0]) : across(across, hosts);
}

// Groups ranks 0, 1... by host, of which hosts[rank] is the number.
inline RanksByHost by_host(const std::vector<int>& hosts) {
  RanksByHost ranks;
  std::vector<int> numbers;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    std::size_t at = 0;
    while (at < numbers.size() && numbers[at] != hosts[rank]) ++at;
    if (at == numbers.size()) {
      numbers.push_back(hosts[rank]);
      ranks.emplace_back();
    }
    ranks[at].push_back(static_cast<int>(rank));
  }
  return ranks;
}

}  // namespace hvdlite::testing
