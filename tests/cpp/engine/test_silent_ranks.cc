// Ranks whose engine stands still, as that of a suspended process does, inside collectives and
// between them: the others say so, and do not wait for ever. An engine stands still in a
// continuation that blocks.
#include <atomic>

#include "check.h"
#include "engine_worlds.h"
#include "negotiation/answer_watch.h"

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
        const std::string words =
            "allreduce 'x' has waited 0.2 s for rank 2, which has agreed to it, but";
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
