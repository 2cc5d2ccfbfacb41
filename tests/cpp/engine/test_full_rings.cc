// Control messages of which more wait than fit into a channel, while their readers are in
// collectives: nobody waits for room in a channel whose reader waits for him.
#include <atomic>

#include "check.h"
#include "engine_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

constexpr int kMany = 2000;
constexpr std::size_t kNameBytes = 500;  // so that their requests fill a ring many times over

// All-reduces with long names.
struct Many {
  Many() : values(kMany, std::vector<float>(1, 1.0F)) {
    for (int i = 0; i < kMany; ++i) {
      entries.push_back(allreduce_entry(std::string(kNameBytes, 'x') + std::to_string(i),
                                        values[static_cast<std::size_t>(i)]));
    }
  }
  void enqueue(Engine& engine) {
    for (const EntryPtr& entry : entries) CHECK_OK(engine.enqueue(entry, /*blocking=*/false));
  }
  void finish(Engine& engine) {
    for (const EntryPtr& entry : entries) {
      // The first failure tells all; the others would only repeat it.
      const Status status = hvdlite::testing::finish(engine, entry);
      CHECK_OK(status);
      if (!status.ok()) return;
    }
    for (const auto& one : values) CHECK_EQ(one[0], static_cast<float>(engine.size()));
  }
  std::vector<std::vector<float>> values;
  std::vector<EntryPtr> entries;
};

}  // namespace

// Rank 0 answers 'all' while it is in 'outside'. Rank 1 enters 'all', and reads no answer until
// rank 0 has come there, too.
TEST(engine_rank_0_answers_more_than_fits_while_a_rank_waits_for_it) {
  for (const Hosts& hosts : {Hosts{0, 0, 0}, Hosts{0, 1, 1}}) {
    std::atomic<bool> rank_0_is_in_outside{false};
    std::atomic<bool> many_are_queued{false};
    run_world(hosts, [&](int rank, Engine& engine) {
      const std::uint32_t pair = add_set(engine, {0, 2});
      std::vector<float> numbers[3] = {{1.0F}, {1.0F}, {1.0F}};
      const EntryPtr slow = in_set(allreduce_entry("slow", numbers[0]), pair);
      const EntryPtr outside = in_set(allreduce_entry("outside", numbers[1]), pair);
      const EntryPtr all = allreduce_entry("all", numbers[2]);
      Many many;
      const auto answers = [&] { return engine.counters().messages_sent.get(); };
      if (rank == 0) {
        CHECK_OK(run(engine, slow));
        const auto before = answers();
        CHECK_OK(engine.enqueue(all, false));
        CHECK_OK(engine.enqueue(outside, false));
        CHECK(soon([&] { return answers() > before; }));
        rank_0_is_in_outside = true;
        CHECK(soon([&] { return answers() > before + 2; }));  // 'all' to both of the others
        many.enqueue(engine);
        many_are_queued = true;
      } else if (rank == 1) {
        many.enqueue(engine);
        CHECK(soon([&] { return rank_0_is_in_outside.load(); }));
        CHECK_OK(engine.enqueue(all, false));
      } else {
        slow->completion->then([&] { CHECK(soon([&] { return many_are_queued.load(); })); });
        CHECK_OK(engine.enqueue(outside, false));
        CHECK_OK(engine.enqueue(all, false));
        many.enqueue(engine);
        CHECK_OK(engine.enqueue(slow, false));
      }
      CHECK_OK(finish(engine, all));
      if (rank != 1) CHECK_OK(finish(engine, outside));
      many.finish(engine);
    });
  }
}

// Rank 2 passes on what its host says to rank 0, which waits for it in a collective and reads
// nothing until that has ended.
TEST(engine_leader_passes_on_more_than_fits_while_rank_0_waits_for_it) {
  std::atomic<bool> answered{false};
  std::atomic<int> ready{0};
  const auto body = [&](int rank, Engine& engine) {
    std::vector<float> numbers[2] = {{1.0F}, {1.0F}};
    const EntryPtr slow = allreduce_entry("slow", numbers[0]);
    const EntryPtr all = allreduce_entry("all", numbers[1]);
    Many many;
    if (rank == 2) slow->completion->then([&] { CHECK(soon([&] { return answered.load(); })); });
    if (rank != 1) CHECK_OK(engine.enqueue(all, false));
    CHECK_OK(engine.enqueue(slow, false));
    CHECK(soon([&] { return slow->completion->done(); }));
    if (rank == 2) many.enqueue(engine);  // its engine is busy with the end of 'slow'
    const auto before = engine.counters().messages_sent.get();
    ++ready;
    CHECK(soon([&] { return ready == 4; }));
    if (rank == 1) CHECK_OK(engine.enqueue(all, false));
    if (rank == 0) {
      CHECK(soon([&] { return engine.counters().messages_sent.get() > before; }));
      answered = true;
    }
    CHECK_OK(finish(engine, all));
    if (rank != 2) many.enqueue(engine);
    many.finish(engine);
  };
  run_world({0, 0, 1, 1}, body, quick_config(), /*control_tree=*/true);
}
