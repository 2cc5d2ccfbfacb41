// The binary tree by which a reduction combines its sources, in their order.
//
// Its leaves are ranks. A node halves its ranks, and the left part has the one more of an odd
// number: so 3 is (a + b) + c, and 5 is ((a + b) + c) + (d + e). A node that has ranks of several
// hosts is cut between two hosts, as near as can be to where it would be halved (of two as near,
// behind the later one). So each host's ranks are one node, and where every cut falls on the half,
// as with 8 ranks on hosts of 4, 2 and 2, the tree is that of one host with all ranks.
//
// Pure functions; any thread.
#pragma once

#include <span>
#include <vector>

#include "base/status.h"

namespace hvdlite {

// Returns the part of the tree that is above the hosts, of which each has so many ranks: for every
// node, itself before its left part and that before its right one, the number of hosts on its left.
std::vector<int> tree_over_hosts(std::span<const int> ranks);

// The virtual ranks [first, first + size).
struct VirtualBlock {
  int first = 0;
  int size = 0;
};

// Cuts `virtual_size` virtual ranks, a power of two, into halves along the tree over the members of
// a group, and returns the block that each of them gets. The sum over all virtual ranks by halves
// is then the sum over the members' blocks by the tree. `hosts` has each member's host.
// kInvalidArgument: they are too few.
Result<std::vector<VirtualBlock>> virtual_blocks(std::span<const int> hosts, int virtual_size);

}  // namespace hvdlite
