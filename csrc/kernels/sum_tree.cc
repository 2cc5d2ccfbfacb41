#include "kernels/sum_tree.h"

#include <bit>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <numeric>
#include <string>

namespace hvdlite {
namespace {

using Sizes = std::span<const int>;

// Returns how many of a node's hosts lie in its left part.
std::size_t hosts_on_the_left(Sizes ranks) {
  const int half = (std::accumulate(ranks.begin(), ranks.end(), 0) + 1) / 2;
  std::size_t best = 1;
  int before = ranks[0];  // ranks on the first `cut` hosts
  int distance = std::abs(before - half);
  for (std::size_t cut = 2; cut < ranks.size(); ++cut) {
    before += ranks[cut - 1];
    if (std::abs(before - half) > distance) break;
    best = cut;
    distance = std::abs(before - half);
  }
  return best;
}

void add_nodes(Sizes ranks, std::vector<int>& nodes) {
  if (ranks.size() < 2) return;
  const std::size_t left = hosts_on_the_left(ranks);
  nodes.push_back(static_cast<int>(left));
  add_nodes(ranks.first(left), nodes);
  add_nodes(ranks.subspan(left), nodes);
}

// Appends the blocks of the ranks of these hosts, which share the block `all`. Returns whether it
// is large enough.
bool add_blocks(Sizes ranks, VirtualBlock all, std::vector<VirtualBlock>& blocks) {
  if (ranks.size() == 1 && ranks[0] == 1) {
    blocks.push_back(all);
    return true;
  }
  const VirtualBlock left{all.first, all.size / 2};
  const VirtualBlock right{all.first + left.size, left.size};
  if (left.size == 0) return false;
  if (ranks.size() > 1) {
    const std::size_t cut = hosts_on_the_left(ranks);
    return add_blocks(ranks.first(cut), left, blocks) &&
           add_blocks(ranks.subspan(cut), right, blocks);
  }
  const int parts[] = {ranks[0] - ranks[0] / 2, ranks[0] / 2};
  return add_blocks({&parts[0], 1}, left, blocks) && add_blocks({&parts[1], 1}, right, blocks);
}

}  // namespace

std::vector<int> tree_over_hosts(std::span<const int> ranks) {
  std::vector<int> nodes;
  add_nodes(ranks, nodes);
  return nodes;
}

Result<std::vector<VirtualBlock>> virtual_blocks(std::span<const int> hosts, int virtual_size) {
  const std::string asked = std::to_string(virtual_size) + " virtual ranks";
  if (virtual_size < 1 || !std::has_single_bit(static_cast<unsigned>(virtual_size))) {
    return Status(StatusCode::kInvalidArgument, asked + " are not a power of two");
  }
  std::map<int, std::size_t> places;  // of hosts, as they first appear
  std::vector<std::vector<std::size_t>> members(hosts.size());
  for (std::size_t member = 0; member < hosts.size(); ++member) {
    members[places.try_emplace(hosts[member], places.size()).first->second].push_back(member);
  }
  std::vector<int> ranks;  // on each of the hosts
  for (std::size_t i = 0; i < places.size(); ++i)
    ranks.push_back(static_cast<int>(members[i].size()));
  std::vector<VirtualBlock> in_order;
  if (ranks.empty() || !add_blocks(ranks, {0, virtual_size}, in_order)) {
    return Status(StatusCode::kInvalidArgument, asked + " are too few for " +
                                                    std::to_string(hosts.size()) +
                                                    " ranks, as they lie on their hosts");
  }
  std::vector<VirtualBlock> blocks(hosts.size());
  auto next = in_order.begin();
  for (const auto& of_host : members) {
    for (const std::size_t member : of_host) blocks[member] = *next++;
  }
  return blocks;
}

}  // namespace hvdlite
