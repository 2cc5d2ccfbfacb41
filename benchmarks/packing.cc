// Measures what packing numbers for other hosts costs (kernels/packed.h), in times of a memcpy of
// the same float32 numbers in the same run: 1 MiB, which stays in the cache, and 64 MiB, which does
// not. Prints JSON lines. `make build/cpp/hvdlite_tests`, then
//
//     cmake --build build/cpp --target packing && build/cpp/packing
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels/packed.h"
#include "kernels/packed_variants.h"

namespace {

using namespace hvdlite;

// Seconds of a call: the best of some rounds.
double seconds_of(int calls, const std::function<void()>& call) {
  constexpr int kRounds = 15;
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    best = std::min(best, taken.count() / calls);
  }
  return best;
}

void measure(const char* variant, const PackedLoops& loops, std::size_t count) {
  std::vector<float> numbers(count);
  std::vector<float> copy(count);
  std::vector<std::byte> packed(packed_bytes(count));
  std::vector<std::byte> others(packed_bytes(count));
  for (std::size_t i = 0; i < count; ++i) numbers[i] = static_cast<float>(i % 977) - 400.0F;
  const std::vector<const std::byte*> sources = {packed.data(), others.data()};
  const int calls = static_cast<int>(std::max<std::size_t>((1 << 24) / count, 1));
  const double memcpy_seconds =
      seconds_of(calls, [&] { std::memcpy(copy.data(), numbers.data(), count * sizeof(float)); });
  loops.pack(numbers.data(), count, others.data());
  const double pack = seconds_of(calls, [&] { loops.pack(numbers.data(), count, packed.data()); });
  const double sum = seconds_of(calls, [&] { loops.sum(sources, count, {2}, others.data()); });
  const double unpack = seconds_of(calls, [&] { loops.unpack(packed.data(), count, copy.data()); });
  std::printf(
      "{\"benchmark\": \"packing\", \"variant\": \"%s\", \"bytes\": %zu, \"memcpy_us\": %.1f, "
      "\"pack_times_memcpy\": %.2f, \"sum_of_two_times_memcpy\": %.2f, "
      "\"unpack_times_memcpy\": %.2f}\n",
      variant, count * sizeof(float), memcpy_seconds * 1e6, pack / memcpy_seconds,
      sum / memcpy_seconds, unpack / memcpy_seconds);
}

}  // namespace

int main() {
  for (const std::size_t count : {std::size_t{1} << 18, std::size_t{1} << 24}) {
    measure("best", best_packed_loops(), count);
    measure("portable", portable::kPackedLoops, count);
  }
  return 0;
}
