// Ranks whose engine stands still, as that of a suspended process does, inside collectives and
// between them: the others say so, and do not wait for ever. An engine stands still in a
// continuation that blocks. Then control messages of which more wait than fit into a channel, while
// their readers are in collectives: nobody waits for room in a channel whose reader waits for him.
#include <atomic>

#include "check.h"
#include "engine/negotiator.h"
#include "engine_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

Config watchful_config() {
  Config config = quick_config();
  config.stall_warning = 0.2;
  return config;
}

// What the engine tells of a stall because of this rank, with these words in it; or "". On a busy
// machine it may tell of other stalls before.
std::string told(Engine& engine, int rank, const std::string& words) {
  for (const Event& event : engine.live().events) {
    if (event.kind == "stall" && event.rank == rank && has(event.text, words)) return event.text;
  }
  return "";
}

}  // namespace

TEST(engine_says_which_rank_is_silent_inside_a_collective) {
  for (const Hosts& hosts : {Hosts{0, 0, 0}, Hosts{0, 1, 2}}) {
    std::atomic<int> warned{0};
    const auto body = [&](int rank, Engine& engine) {
      std::vector<float> numbers[2] = {{1.0F}, std::vector<float>(100'000, 1.0F)};
      const EntryPtr slow = allreduce_entry("slow", numbers[0]);
      const EntryPtr entry = allreduce_entry("x", numbers[1]);
      if (rank == 2) {
        slow->completion->then([&] { CHECK(soon([&] { return warned == 2; })); });
        // Rank 2 asks for both before its engine stands still.
        CHECK_OK(engine.enqueue(entry, false));
        CHECK_OK(run(engine, slow));
      } else {
        CHECK_OK(run(engine, slow));
        CHECK_OK(engine.enqueue(entry, false));
        const std::string words = "rank 2 has called allreduce 'x', but ";
        std::string text;
        CHECK(soon([&] { return !(text = told(engine, 2, words)).empty(); }));
        ++warned;
        CHECK_EQ(rank == 0, has(text, "(last called 'slow' "));
      }
      CHECK_OK(finish(engine, entry));
    };
    run_world(hosts, body, watchful_config());
  }
}

TEST(engine_gives_up_rank_0_that_is_silent_between_collectives) {
  struct Case {
    double collective_timeout;
    double stall_shutdown;
    StatusCode code;
  };
  for (const Case& one : {Case{3, 600, StatusCode::kTimeout}, Case{0, 3, StatusCode::kStalled}}) {
    Config config = watchful_config();
    config.collective_timeout = one.collective_timeout;
    config.stall_shutdown = one.stall_shutdown;
    std::atomic<int> ended{0};
    const auto body = [&](int rank, Engine& engine) {
      std::vector<float> values(1, 1.0F);
      const EntryPtr slow = allreduce_entry("slow", values);
      if (rank == 0) slow->completion->then([&] { CHECK(soon([&] { return ended == 2; })); });
      CHECK_OK(run(engine, slow));
      if (rank == 0) return;
      const Status status = run(engine, allreduce_entry("x", values));
      // One of them has told the other.
      CHECK_STATUS(status, one.code);
      CHECK_EQ(status.failed_rank(), 0);
      CHECK(has(status.message(), "allreduce 'x' waits for rank 0, whose engine does not answer"));
      CHECK(!told(engine, 0, "whose engine does not answer").empty());
      ++ended;
    };
    run_world({0, 0, 1}, body, config);
  }
}

// Rank 1 waits for rank 2 for much longer than for a silent rank 0, whose engine answers.
TEST(engine_does_not_give_up_rank_0_that_waits_itself) {
  Config config = watchful_config();
  config.stall_warning = 0.05;
  config.stall_shutdown = 0;
  config.collective_timeout = 2;
  std::atomic<bool> answered{false};
  const auto body = [&](int rank, Engine& engine) {
    std::vector<float> values(1, 1.0F);
    const EntryPtr entry = allreduce_entry("x", values);
    if (rank == 2) CHECK(soon([&] { return answered.load(); }));
    CHECK_OK(engine.enqueue(entry, false));
    if (rank == 0) {
      const auto begun = std::chrono::steady_clock::now();
      const auto before = engine.counters().messages_sent.get();
      const auto long_enough = [&] {
        return engine.counters().messages_sent.get() > before + 20 &&
               std::chrono::steady_clock::now() - begun > 2500ms;
      };
      CHECK(soon(long_enough));
      answered = true;
    }
    CHECK_OK(finish(engine, entry));
  };
  run_world({0, 0, 1}, body, config);
}

TEST(answer_watch_asks_warns_and_gives_up) {
  using Act = AnswerWatch::Act;
  Config config;
  config.stall_warning = 8;
  config.stall_shutdown = 30;
  const AnswerWatch::TimePoint start(1h);
  AnswerWatch watch(config);
  watch.begin(start);
  CHECK(watch.due() == start + 2s);
  CHECK(watch.look(start + 1s) == Act::kNothing);
  CHECK(watch.look(start + 2s) == Act::kAsk);
  CHECK(watch.due() == start + 8s);
  watch.heard();
  CHECK(watch.look(start + 8s) == Act::kNothing);
  CHECK(watch.look(start + 10s) == Act::kAsk);
  CHECK(watch.look(start + 16s) == Act::kWarn);
  CHECK(watch.look(start + 23s) == Act::kNothing);
  CHECK(watch.look(start + 24s) == Act::kWarn);
  CHECK(watch.due() == start + 38s);
  CHECK(watch.look(start + 38s) == Act::kFail);
  // This rank was stopped itself, for an hour.
  watch.begin(start);
  CHECK(watch.look(start + 2s) == Act::kAsk);
  CHECK(watch.look(start + 1h) == Act::kNothing);
  CHECK(watch.look(start + 1h + 2s) == Act::kAsk);
  config.stall_warning = config.stall_shutdown = config.collective_timeout = 0;
  AnswerWatch none(config);
  none.begin(start);
  CHECK(none.due() == AnswerWatch::TimePoint::max());
}

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
