// An allocation of the engine's own that fails ends the world with an error, and no wait is left.
#include <new>

#include "engine_worlds.h"

namespace hvdlite {
namespace {

using namespace hvdlite::testing;

// Has no memory for its second all-reduce.
class StarvedBackend : public HostBackend {
 public:
  using HostBackend::HostBackend;
  Status allreduce(const Allreduce& call, Patience patience) override {
    if (++calls_ == 2) throw std::bad_alloc();
    return HostBackend::allreduce(call, patience);
  }

 private:
  int calls_ = 0;
};

std::vector<std::unique_ptr<Engine>> engines_with_a_starved_rank(int starved, const Hosts& hosts) {
  const Config config = quick_config();
  const auto backend_of = [&](Fabric& fabric, std::size_t rank) -> std::unique_ptr<Backend> {
    if (static_cast<int>(rank) == starved) return std::make_unique<StarvedBackend>(fabric, config);
    return std::make_unique<HostBackend>(fabric, config);
  };
  return make_engines(hosts, config, false, backend_of);
}

TEST(a_rank_without_memory_ends_the_world_and_leaves_nobody_waiting) {
  for (const Hosts& hosts : {Hosts{0, 0, 0}, Hosts{0, 1, 1}}) {
    for (const int starved : {0, 1}) {
      for (const bool blocking : {false, true}) {
        auto engines = engines_with_a_starved_rank(starved, hosts);
        std::vector<std::thread> threads;
        for (std::size_t rank = 0; rank < engines.size(); ++rank) {
          threads.emplace_back([&, rank] {
            Engine& engine = *engines[rank];
            std::vector<float> values(8, 1.0F);
            std::vector<float> others(8, 1.0F);
            CHECK_OK(run(engine, allreduce_entry("first", values), blocking));
            // Only one rank submits this, so that it is in flight when the memory lacks.
            const EntryPtr alone = allreduce_entry("alone", others);
            const bool submits = static_cast<int>(rank) == starved;
            if (submits) CHECK_OK(engine.enqueue(alone, /*blocking=*/false));
            const Status status = run(engine, allreduce_entry("second", values), blocking);
            const std::string reason =
                "rank " + std::to_string(starved) + " has no memory left for the engine's own work";
            CHECK(status.message().find(reason) != std::string::npos);
            CHECK_EQ(status.failed_rank(), starved);
            if (submits) {
              CHECK(finish(engine, alone).message().find(reason) != std::string::npos);
            }
            engine.shutdown();
          });
        }
        for (std::thread& thread : threads) thread.join();
      }
    }
  }
}

}  // namespace
}  // namespace hvdlite
