// All-reduce against a plain reference that spells out the order: the same bits on every rank,
// for every type, operation, shape of world, length, scale and place in memory.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "base/dtype.h"
#include "check.h"
#include "host/host_backend.h"
#include "sum_tree.h"
#include "support/inproc_world.h"

using namespace hvdlite;
using namespace std::chrono_literals;

namespace {

using Bytes = std::vector<std::byte>;
using Hosts = std::vector<int>;

float widen(Float16 value) { return to_float(value); }
float widen(Bfloat16 value) { return to_float(value); }
template <typename T>
T widen(T value) {
  return value;
}
template <typename T, typename A>
T narrow(A value) {
  if constexpr (std::is_same_v<T, Float16>) return to_float16(value);
  if constexpr (std::is_same_v<T, Bfloat16>) return to_bfloat16(value);
  if constexpr (std::is_same_v<T, A>) return value;
}

// Calls body(T{}) with the type's own representation.
template <typename Body>
void with_type(DataType dtype, Body&& body) {
  switch (dtype) {
    case DataType::kUint8:
      return body(std::uint8_t{});
    case DataType::kUint16:
      return body(std::uint16_t{});
    case DataType::kUint32:
      return body(std::uint32_t{});
    case DataType::kUint64:
      return body(std::uint64_t{});
    case DataType::kInt8:
      return body(std::int8_t{});
    case DataType::kInt16:
      return body(std::int16_t{});
    case DataType::kInt32:
      return body(std::int32_t{});
    case DataType::kInt64:
      return body(std::int64_t{});
    case DataType::kFloat16:
      return body(Float16{});
    case DataType::kBfloat16:
      return body(Bfloat16{});
    case DataType::kFloat32:
      return body(float{});
    case DataType::kFloat64:
      return body(double{});
    default:  // copied only, or complex: pairs of floats
      CHECK(false);
  }
}

template <typename A>
A combine(ReduceOp op, A a, A b) {
  switch (op) {
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return b > a ? b : a;
    case ReduceOp::kProduct:
      if constexpr (std::is_integral_v<A>) {
        return static_cast<A>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
      }
      return a * b;
    default:
      if constexpr (std::is_integral_v<A>) {
        return static_cast<A>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
      }
      return a + b;
  }
}

struct Case {
  DataType dtype;
  ReduceOp op;
  std::size_t count;
  bool in_place;
  double prescale;
  double postscale;
};

template <typename T>
T random_value(std::mt19937_64& random) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(random());
  // Not representable in 16 bits, so that the place of each rounding shows.
  const double value = (static_cast<double>(random() >> 11) * 0x1p-53 - 0.5) * 6;
  using A = decltype(widen(T{}));
  return narrow<T>(static_cast<A>(value));
}

// In float64, towards zero, and within the type.
template <typename T>
T scale_integer(T value, double factor) {
  const double scaled = std::trunc(static_cast<double>(value) * factor);
  if (scaled <= static_cast<double>(std::numeric_limits<T>::min())) {
    return std::numeric_limits<T>::min();
  }
  if (scaled >= static_cast<double>(std::numeric_limits<T>::max())) {
    return std::numeric_limits<T>::max();
  }
  return static_cast<T>(scaled);
}

// Returns what the ranks whose inputs are `values` shall get. The tree is walked once, and combines
// whole arrays.
template <typename T>
std::vector<T> reference(const Case& c, const std::vector<Hosts>& by_host,
                         const std::vector<std::vector<T>>& values) {
  using A = decltype(widen(T{}));
  const auto scaled = [&](T value) -> A {
    if (c.prescale == 1.0) return widen(value);
    if constexpr (std::is_integral_v<T>)
      return scale_integer(value, c.prescale);
    else
      return widen(narrow<T>(static_cast<A>(widen(value) * static_cast<A>(c.prescale))));
  };
  // Rounded once per level; of an average of 16-bit floats the mean, which counts as often as it
  // has ranks.
  const bool mean = c.op == ReduceOp::kAverage && !std::is_same_v<T, A>;
  const std::vector<A> totals = testing::sum_by_tree(
      by_host,
      [&](int rank) {
        std::vector<A> leaf;
        for (const T value : values[rank]) leaf.push_back(scaled(value));
        return leaf;
      },
      [&](std::vector<A> a, const std::vector<A>& b) {
        for (std::size_t i = 0; i < a.size(); ++i) a[i] = combine<A>(c.op, a[i], b[i]);
        return a;
      },
      [&](const Hosts& of, std::vector<A> of_host) {
        const auto ranks = static_cast<A>(mean ? of.size() : 1);
        for (A& one : of_host) {
          one = static_cast<A>(widen(narrow<T>(static_cast<A>(one / ranks))) * ranks);
        }
        return of_host;
      });
  std::vector<T> results;
  for (A total : totals) {
    if (c.op == ReduceOp::kAverage) total = static_cast<A>(total / static_cast<A>(values.size()));
    if (c.postscale != 1.0) {
      if constexpr (std::is_integral_v<T>)
        total = scale_integer(total, c.postscale);
      else
        total *= static_cast<A>(c.postscale);
    }
    results.push_back(narrow<T>(total));
  }
  return results;
}

struct Prepared {
  Case c;
  std::vector<Bytes> inputs;  // by rank
  Bytes expected;
};

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto* begin = reinterpret_cast<const std::byte*>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}

Prepared prepare(const Case& c, const Hosts& hosts, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Prepared prepared{c, {}, {}};
  with_type(c.dtype, [&](auto tag) {
    using T = decltype(tag);
    std::vector<std::vector<T>> values(hosts.size());
    for (std::vector<T>& of_rank : values) {
      for (std::size_t i = 0; i < c.count; ++i) of_rank.push_back(random_value<T>(random));
      prepared.inputs.push_back(bytes_of(of_rank));
    }
    prepared.expected = bytes_of(reference<T>(c, testing::by_host(hosts), values));
  });
  return prepared;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (int dtype = 0; dtype < kDataTypeCount; ++dtype) {
    const auto type = static_cast<DataType>(dtype);
    if (!computes(type) || is_complex(type)) continue;
    for (const ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      for (const std::size_t count : {0, 1, 7, 1000, 5003}) {
        const bool scaled = cases.size() % 3 == 0;
        cases.push_back(
            {type, op, count, cases.size() % 2 == 0, scaled ? 0.3 : 1.0, scaled ? 1.7 : 1.0});
      }
    }
  }
  return cases;
}

// Tensors as views somewhere inside other memory: not even their elements are aligned.
struct Tensors {
  Tensors(const Prepared& prepared, int rank)
      : input(prepared.inputs[rank].size() + 1), output(input.size()) {
    std::copy(prepared.inputs[rank].begin(), prepared.inputs[rank].end(), input.begin() + 1);
    const Case& c = prepared.c;
    std::byte* result = (c.in_place ? input : output).data() + 1;
    std::size_t begin = 0;
    for (const std::size_t wanted : {std::size_t{1}, std::size_t{0}, std::size_t{300}, c.count}) {
      const std::size_t count = std::min(wanted, c.count - begin);
      const std::size_t skipped = 1 + begin * size_of(c.dtype);
      pieces.push_back({input.data() + skipped, result + begin * size_of(c.dtype), count,
                        c.prescale, c.postscale});
      begin += count;
    }
  }
  bool hold(const Bytes& expected, bool in_place) const {
    const std::byte* result = (in_place ? input : output).data() + 1;
    return expected.empty() || std::memcmp(result, expected.data(), expected.size()) == 0;
  }
  Bytes input;
  Bytes output;
  std::vector<Piece> pieces;
};

void reduce_all(Backend& backend, const Group& world, int rank,
                const std::vector<Prepared>& prepared) {
  for (const Prepared& one : prepared) {
    const Case& c = one.c;
    Tensors tensors(one, rank);
    CHECK_OK(backend.allreduce({world, c.dtype, c.op, tensors.pieces}, 20s));
    if (!tensors.hold(one.expected, c.in_place)) {
      hvdlite::testing::report_failure(
          __FILE__, __LINE__,
          std::string(name_of(c.dtype)) + " " + std::string(name_of(c.op)) + " of " +
              std::to_string(c.count) + " differs from the reference on rank " +
              std::to_string(rank) + " of " + std::to_string(world.ranks.size()));
    }
  }
}

// Compares with the reference of the same ranks on hosts of `as` instead, where it is given, in the
// floating-point types whose sums no host rounds; those of integers depend on no order.
void compare_in_world(const Hosts& hosts, const Hosts& as = {}) {
  Config config;
  config.shm_chunk = 4096;
  config.tcp_chunk = 8192;
  config.shm_small = 512;
  std::vector<Prepared> prepared;
  for (const Case& c : all_cases()) {
    if (!as.empty() && (!is_floating(c.dtype) || size_of(c.dtype) == 2)) continue;
    prepared.push_back(prepare(c, as.empty() ? hosts : as, prepared.size() + 1));
  }
  auto fabrics = make_inproc_world(hosts, config);
  CHECK_OK(fabrics.status());
  Group world;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    world.ranks.push_back(static_cast<int>(rank));
  }
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    threads.emplace_back([&, rank] {
      HostBackend backend(*fabrics.value()[rank], config);
      reduce_all(backend, world, static_cast<int>(rank), prepared);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST(reduction_bits_on_one_host) {
  for (const Hosts& hosts : {Hosts{0}, Hosts{0, 0}, Hosts{0, 0, 0}, Hosts{0, 0, 0, 0}}) {
    compare_in_world(hosts);
  }
}

TEST(reduction_bits_of_more_ranks_on_one_host) {
  for (const std::size_t ranks : {5, 6, 7, 8, 9}) compare_in_world(Hosts(ranks, 0));
}

TEST(reduction_bits_across_hosts) {
  for (const Hosts& hosts : {Hosts{0, 1}, Hosts{0, 1, 2}, Hosts{0, 0, 1, 1}, Hosts{0, 0, 0, 1},
                             Hosts{0, 1, 2, 3, 4}, Hosts{0, 0, 0, 1, 1, 1, 1, 1}}) {
    compare_in_world(hosts);
  }
}

TEST(reduction_bits_across_hosts_that_carry_nodes_are_those_of_one_host) {
  for (const Hosts& hosts :
       {Hosts{0, 0, 1}, Hosts{0, 0, 1, 1}, Hosts{0, 1, 2, 3, 4}, Hosts{0, 0, 0, 1, 1},
        Hosts{0, 0, 0, 1, 1, 1}, Hosts{0, 0, 0, 0, 1, 1, 1, 1}, Hosts{0, 0, 0, 0, 1, 1, 2, 2},
        Hosts{0, 0, 1, 2, 3, 3, 3, 3}}) {
    compare_in_world(hosts, Hosts(hosts.size(), 0));
  }
}

TEST(reduction_bits_across_hosts_whose_ranks_interleave) { compare_in_world({0, 1, 0, 2, 1, 0}); }
