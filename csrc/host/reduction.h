// The arithmetic of one reduction over the members of each host and then over hosts, the same for
// an all-reduce and a reduce-scatter: so their results are the same bits. A value; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "host/layout.h"
#include "kernels/reduce.h"

namespace hvdlite {

// Addresses of what is reduced into one, in ascending order of the members that it comes from.
using Sources = std::span<const void* const>;

class HostReduction {
 public:
  // `travels` is the element type of what members and hosts give to each other. The layout is
  // borrowed.
  HostReduction(const HostLayout& layout, const Group& group, DataType travels, ReduceOp op)
      : layout_(layout),
        dtype_(travels),
        op_(op),
        divisor_(op == ReduceOp::kAverage ? group.divisor() : 1) {}

  // Reduces what the members of this host give to what this host gives to the others.
  void within_host(Sources members, void* to, std::size_t count) const {
    const ReduceOp op = op_ == ReduceOp::kAverage ? ReduceOp::kSum : op_;
    reduce(dtype_, op, members, to, count, {exchanges_means() ? layout_.counts[layout_.host] : 1});
  }
  // Ends the reduction: `parts` are what the hosts gave or, of a group on one host, its members.
  void finish(Sources parts, void* to, std::size_t count, double factor) const {
    reduce(dtype_, op_, parts, to, count,
           {divisor_, factor, exchanges_means() ? layout_.counts.data() : nullptr,
            layout_.spans_hosts() ? layout_.tree.data() : nullptr});
  }

 private:
  // A 16-bit float may not hold the sum of a host, but it holds the mean: so the hosts give each
  // other means, and each of them counts as often as its host has members. Wider types: sums.
  bool exchanges_means() const {
    return op_ == ReduceOp::kAverage && layout_.spans_hosts() && is_floating(dtype_) &&
           size_of(dtype_) == sizeof(std::uint16_t);
  }

  const HostLayout& layout_;
  const DataType dtype_;
  const ReduceOp op_;
  const int divisor_;  // 1 unless it averages
};

}  // namespace hvdlite
