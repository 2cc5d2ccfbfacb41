// Simulates the negotiation of large worlds (tests/cpp/support/negotiation_world.h): many hosts
// with 8 ranks each, which agree on 20 all-reduces, once for the first time, and then from the
// cache. `star` is what a world of up to 64 ranks does: every rank talks to rank 0. Prints JSON
// lines: messages and bytes over a rank's channels, both ways, of the rank with the most and of
// rank 0; the microseconds that rank 0 is busy; how often each rank had to look at its channels;
// and the KiB of the heap per rank. `make build/cpp/hvdlite_tests`, then
//
//     cmake --build build/cpp --target negotiation && build/cpp/negotiation
#include <malloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "support/negotiation_world.h"

namespace {

using namespace hvdlite;

constexpr int kRanksOfHost = 8;
constexpr int kTensors = 20;
constexpr int kRingKib = 2 * 16;  // of a channel in this process, which is not the ranks' own

std::size_t heap_bytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

struct Figures {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
};

Figures figures_of(const ControlTraffic& after, const ControlTraffic& before) {
  return {after.messages_sent - before.messages_sent + after.messages_received -
              before.messages_received,
          after.bytes_sent - before.bytes_sent + after.bytes_received - before.bytes_received};
}

void measure(NegotiationWorld& world, const char* what, int hosts, const char* way, double kib) {
  std::vector<std::string> names;
  for (int i = 0; i < kTensors; ++i) names.push_back("gradient/layer" + std::to_string(i));
  std::vector<ControlTraffic> before;
  for (int rank = 0; rank < world.size(); ++rank) before.push_back(world.traffic(rank));
  const auto busy = world.busy_at_rank_0();
  const int looks = world.negotiate(names);
  if (looks == 0) std::abort();
  Figures most;
  for (int rank = 0; rank < world.size(); ++rank) {
    const Figures own = figures_of(world.traffic(rank), before[rank]);
    most.messages = std::max(most.messages, own.messages);
    most.bytes = std::max(most.bytes, own.bytes);
  }
  const Figures first = figures_of(world.traffic(0), before[0]);
  const std::chrono::duration<double, std::micro> us = world.busy_at_rank_0() - busy;
  std::printf(
      "{\"hosts\": %d, \"ranks\": %d, \"way\": \"%s\", \"negotiation\": \"%s\", "
      "\"messages_most\": %llu, \"messages_rank_0\": %llu, \"bytes_most\": %llu, "
      "\"bytes_rank_0\": %llu, \"rank_0_us\": %.0f, \"looks\": %d, \"heap_kib\": %.0f}\n",
      hosts, world.size(), way, what, static_cast<unsigned long long>(most.messages),
      static_cast<unsigned long long>(first.messages), static_cast<unsigned long long>(most.bytes),
      static_cast<unsigned long long>(first.bytes), us.count(), looks, kib);
}

void simulate(int hosts, bool tree) {
  std::vector<int> host_of;
  for (int rank = 0; rank < hosts * kRanksOfHost; ++rank) host_of.push_back(rank / kRanksOfHost);
  const std::size_t before = heap_bytes();
  auto world = NegotiationWorld::make(host_of, tree);
  if (!world.ok()) {
    std::fprintf(stderr, "%s\n", world.status().message().c_str());
    std::exit(1);
  }
  // There is a channel to each rank but one, in either way.
  const double kib =
      static_cast<double>(heap_bytes() - before) / 1024 / static_cast<double>(host_of.size()) -
      kRingKib;
  const char* way = tree ? "tree" : "star";
  measure(*world.value(), "first", hosts, way, kib);
  for (int warm = 0; warm < 3; ++warm) world.value()->negotiate({"warm"});
  measure(*world.value(), "cached", hosts, way, kib);
}

}  // namespace

int main() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  for (const int hosts : {8, 32, 128}) {
    for (const bool tree : {false, true}) simulate(hosts, tree);
  }
  return 0;
}
