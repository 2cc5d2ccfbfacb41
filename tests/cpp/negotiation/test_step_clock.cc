// StepClock: where the time of steps goes, on arrivals that are made up.
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "coordinators.h"
#include "negotiation/stall_monitor.h"
#include "negotiation/step_clock.h"

namespace hvdlite::testing::steps {
namespace {

using namespace std::chrono_literals;
using TimePoint = StepClock::TimePoint;
using Duration = StepClock::Duration;
using Arrivals = std::vector<Arrival>;

constexpr TimePoint kBegin = kStart + 1h;
constexpr bool kCounted = true;

Arrival alone(Duration when) { return {kBegin + when, kBegin + when, false}; }

Duration sum(const StepClock::Rank& rank) {
  return rank.backward + rank.waiting + rank.communicating + rank.between;
}

// Of a step: when each rank submits its first and its last gradient, and when it has the results.
struct Made {
  std::vector<Duration> first;
  std::vector<Duration> last;
  Duration end{};
};

// Each step has two gradients, and those of a rank travel in two frames.
void run(StepClock& clock, const std::vector<Made>& steps) {
  for (const Made& step : steps) {
    Arrivals first;
    Arrivals last;
    for (const Duration when : step.first) first.push_back(alone(when));
    for (const Duration when : step.last) last.push_back(alone(when));
    clock.arrived("a", first, kCounted);
    clock.ended(kBegin + step.last[0]);
    clock.arrived("b", last, kCounted);
    clock.ended(kBegin + step.end);
  }
}

// Steps of 50 ms: backward takes 20 ms, communication 5 ms. One rank begins later, and needs more
// time in backward.
std::vector<Made> with_late(int ranks, int late, Duration at_first, Duration in_backward,
                            int count = 12) {
  std::vector<Made> steps;
  for (int i = 0; i < count; ++i) {
    const Duration begin = i * (50ms + at_first + in_backward);
    Made step{std::vector<Duration>(ranks, begin), std::vector<Duration>(ranks, begin + 20ms), {}};
    step.first[late] += at_first;
    step.last[late] += at_first + in_backward;
    step.end = step.last[late] + 5ms;
    steps.push_back(step);
  }
  return steps;
}

TEST(step_clock_partitions_the_time_of_each_rank_exactly) {
  std::mt19937 random(7);
  const auto some = [&] { return std::chrono::nanoseconds(random() % 30'000'000); };
  StepClock clock(3, 0);
  std::vector<Made> steps;
  Duration now{};
  for (int i = 0; i < 40; ++i) {
    Made step{std::vector<Duration>(3), std::vector<Duration>(3), {}};
    for (int rank = 0; rank < 3; ++rank) {
      step.first[rank] = now + some();
      step.last[rank] = step.first[rank] + some();
      step.end = std::max(step.end, step.last[rank]);
    }
    step.end += some();
    now = step.end;
    steps.push_back(step);
  }
  run(clock, steps);
  const StepClock::Report report = clock.report();
  CHECK_EQ(report.steps, 38U);  // the f' of the next to last one may still become earlier
  Duration all{};
  std::uint64_t last = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const StepClock::Rank& one = report.ranks[rank];
    CHECK(sum(one) == steps[38].first[rank] - steps[0].first[rank]);
    CHECK(one.communicating == report.ranks[0].communicating);
    CHECK(one.late_between >= Duration() && one.late_backward >= Duration());
    all += sum(one);
    last += one.last;
  }
  CHECK(report.time == all);
  CHECK_EQ(last, report.steps);
}

TEST(step_clock_names_a_rank_that_is_late_before_its_first_gradient) {
  for (const int ranks : {2, 3, 4}) {
    StepClock clock(ranks, 0);
    run(clock, with_late(ranks, 1, 30ms, 0ms));
    const StepClock::Report report = clock.report();
    CHECK_EQ(report.steps, 10U);
    CHECK_EQ(report.ranks[1].last, 10U);
    CHECK(report.ranks[1].late_between == 300ms);
    CHECK(report.ranks[1].late_backward == 0ms);
    CHECK(report.ranks[1].held_up == 300ms);
    CHECK(report.ranks[0].held_up == 0ms);
    CHECK(report.ranks[1].waiting == 0ms);
    CHECK(report.ranks[0].waiting == 300ms);
    CHECK(report.ranks[0].backward == 200ms);
    CHECK(report.ranks[0].communicating == 50ms);
    CHECK(report.ranks[0].between == 250ms);
    CHECK(report.ranks[1].between == 550ms);
    CHECK_EQ(report.ranks[0].last, 0U);
  }
}

TEST(step_clock_takes_first_and_last_of_gradients_that_travelled_together) {
  StepClock clock(2, 0);
  for (int i = 0; i < 4; ++i) {
    const TimePoint begin = kBegin + i * 100ms;
    const Arrivals both = {{begin, begin + 20ms, false}, {begin + 5ms, begin + 35ms, false}};
    for (const char* name : {"a", "b", "c"}) clock.arrived(name, both, kCounted);
    clock.ended(begin + 40ms);
  }
  const StepClock::Report report = clock.report();
  CHECK_EQ(report.steps, 2U);
  CHECK(report.ranks[0].backward == 40ms);
  CHECK(report.ranks[1].backward == 60ms);
  CHECK(report.ranks[0].waiting == 30ms);
  CHECK(report.ranks[1].between == 2 * 65ms);
}

// The loss of each step is averaged at once, before the gradients or behind them.
TEST(step_clock_sees_who_was_late_although_all_ranks_meet_later_in_the_step) {
  StepClock clock(2, 0);
  for (int i = 0; i < 4; ++i) {
    const Duration at = i * 100ms;
    clock.arrived("a", Arrivals{alone(at), alone(at + 30ms)}, kCounted);
    clock.arrived("b", Arrivals{alone(at + 10ms), alone(at + 40ms)}, kCounted);
    clock.ended(kBegin + at + 45ms);
    Arrivals loss = {alone(at + 61ms), alone(at + 60ms)};
    loss[0].after_wait = true;
    clock.arrived("loss", loss, kCounted);
    clock.ended(kBegin + at + 63ms);
  }
  const StepClock::Report report = clock.report();
  CHECK_EQ(report.steps, 3U);  // the f' of the third one is that of a burst that is over
  CHECK_EQ(report.ranks[1].last, 3U);
  CHECK(report.ranks[1].late_between == 90ms);
  CHECK(report.ranks[1].late_backward == 0ms);
  CHECK(report.ranks[0].waiting == 90ms);
  CHECK(report.ranks[1].waiting == 3ms);
  CHECK(report.ranks[0].communicating == 3 * 7ms);
  CHECK(report.ranks[0].backward == 3 * 26ms);  // with what lies between the gradients and the loss
  CHECK(report.ranks[0].between == 3 * 37ms);
  CHECK(sum(report.ranks[0]) == 300ms);
  CHECK(sum(report.ranks[1]) == 300ms);
}

TEST(step_clock_sums_what_a_rank_is_late_in_all_bursts) {
  StepClock clock(2, 0);
  for (int i = 0; i < 5; ++i) {
    for (int layer = 0; layer < 4; ++layer) {
      const Duration at = i * 100ms + layer * 20ms;
      Arrivals both = {alone(at), alone(at + 6ms)};
      both[0].after_wait = true;
      clock.arrived("layer" + std::to_string(layer), both, kCounted);
      clock.ended(kBegin + at + 7ms);
    }
  }
  const StepClock::Report report = clock.report();
  CHECK_EQ(report.steps, 4U);
  CHECK_EQ(report.ranks[1].last, 4U);
  CHECK(report.ranks[1].late_between == 4 * 6ms);
  CHECK(report.ranks[1].late_backward == 4 * 18ms);
  CHECK(report.ranks[0].waiting == 4 * 24ms);
}

TEST(step_clock_lets_a_rank_that_has_joined_wait) {
  StepClock clock(2, 0);
  for (int i = 0; i < 5; ++i) {
    const Duration at = i * 100ms;
    const bool joined = i > 0;
    const auto of_rank_1 = [&](Duration when) { return joined ? Arrival() : alone(when); };
    clock.arrived("a", Arrivals{alone(at), of_rank_1(at)}, !joined);
    clock.arrived("b", Arrivals{alone(at + 20ms), of_rank_1(at + 20ms)}, !joined);
    clock.ended(kBegin + at + 30ms);
  }
  const StepClock::Report report = clock.report();
  CHECK_EQ(report.steps, 3U);
  CHECK(sum(report.ranks[0]) == 300ms);
  CHECK(sum(report.ranks[1]) == 230ms);  // from its first gradient to an end, not to an f'
  CHECK(report.ranks[1].backward == 20ms);
  CHECK(report.ranks[1].waiting == 2 * 90ms);
  CHECK(report.ranks[1].between == 0ms);
  CHECK_EQ(report.ranks[1].last, 0U);
}

TEST(step_clock_begins_anew_where_names_do_not_come_again) {
  for (const bool waits : {false, true}) {
    StepClock clock(2, 0);
    // After so many other names, it does not remember the first ones.
    for (int i = 0; i < 30'000; ++i) {
      Arrival arrival = alone(i * 1us - 1s);
      arrival.after_wait = waits;
      clock.arrived("n" + std::to_string(i % 10'000), Arrivals{arrival, arrival}, kCounted);
    }
    CHECK_EQ(clock.report().steps, 0U);
    run(clock, with_late(2, 1, 30ms, 0ms));
    CHECK(clock.report().steps >= 10U);
    CHECK(clock.report().ranks[1].last >= 10U);
  }
}

// The log's lines about a rank that is late, in steps that are made up.

TimePoint at(double milliseconds) {
  return kBegin + std::chrono::duration_cast<TimePoint::duration>(
                      std::chrono::duration<double, std::milli>(milliseconds));
}

Arrival alone(TimePoint when) { return {when, when, false}; }

// Steps of 50 ms with two all-reduces, in which the ranks arrive so many ms late.
void make_steps(StepClock& clock, int first, int count, const std::vector<double>& before,
                const std::vector<double>& after) {
  for (int step = first; step < first + count; ++step) {
    std::vector<Arrival> early;
    std::vector<Arrival> late;
    for (const double ms : before) early.push_back(alone(at(50.0 * step + ms)));
    for (const double ms : after) late.push_back(alone(at(50.0 * step + 20 + ms)));
    clock.arrived("a", early, true);
    clock.arrived("b", late, true);
  }
}

TEST(lateness_names_the_rank_that_is_late_and_by_how_much) {
  StepClock clock(3, 0.99);
  make_steps(clock, 0, 19, {0, 0.1, 4}, {0.1, 0, 6});
  CHECK(!clock.take_line());
  make_steps(clock, 19, 3, {0, 0.1, 4}, {0.1, 0, 6});
  const auto line = clock.take_line();
  CHECK(line.has_value());
  CHECK_EQ(line->rank, 2);
  CHECK_EQ(line->text,
           std::string("rank 2 was last in 100 % of 20 steps, 6.0 ms (12 % of a step) after "
                       "the median, 4.0 ms of it before backward: look at its input, its "
                       "forward pass and its links"));
  CHECK(!clock.take_line());
}

TEST(lateness_writes_no_line_where_no_rank_stands_out) {
  StepClock in_turn(2, 1.0);
  for (int step = 0; step < 100; ++step) {
    const double even = step % 2 == 0 ? 20 : 0;
    make_steps(in_turn, step, 1, {0, 0}, {even, 20 - even});
    CHECK(!in_turn.take_line());
  }
  StepClock slightly(2, 1.0);
  make_steps(slightly, 0, 100, {0, 4}, {0, 4});
  CHECK(!slightly.take_line());
  StepClock silent(2, 0);
  make_steps(silent, 0, 100, {0, 40}, {0, 40});
  CHECK(!silent.take_line());
}

TEST(a_line_is_about_the_steps_since_the_line_before) {
  StepClock clock(2, 1.0);
  make_steps(clock, 0, 22, {0, 0}, {0, 10});
  const auto first = clock.take_line();
  CHECK(first && first->rank == 1);
  make_steps(clock, 22, 44, {0, 0}, {10, 0});
  const auto second = clock.take_line();
  CHECK(second && second->rank == 0);
}

// What the coordinator tells: all-reduces of all ranks, whose names come again.
void submit_by_all(Coordinator& coordinator, const Request& request, const std::vector<int>& ranks,
                   double milliseconds) {
  for (const int rank : ranks) {
    const TimePoint now = at(milliseconds += 4);
    CHECK(coordinator.submit(rank, request, at(1e6), alone(now)).ok());
  }
}

TEST(coordinator_tells_the_arrivals_of_all_reduces_of_all_ranks) {
  StepClock clock(2, 0.29);
  Coordinator coordinator(2, quiet_config(), {nullptr, &clock});
  for (int step = 0; step < 12; ++step) {
    submit_by_all(coordinator, allreduce_of("#once", 1), {0, 1}, 30.0 * step);
    submit_by_all(coordinator, allreduce_of("a", 1), {1, 0}, 30.0 * step + 10);
    (void)coordinator.take_responses();
  }
  const std::vector<Notice> told = coordinator.take_notices();
  CHECK_EQ(told.size(), 1U);
  CHECK_EQ(told[0].event, std::string("late"));
  CHECK_EQ(told[0].text.substr(0, 40), std::string("rank 0 was last in 100 % of 10 steps, 4."));
}

TEST(coordinator_tells_no_arrivals_while_a_rank_has_joined) {
  StepClock clock(2, 0.1);
  Coordinator coordinator(2, quiet_config(), {nullptr, &clock});
  CHECK(coordinator.submit(1, join_request(), at(0)).ok());
  for (int step = 0; step < 30; ++step) {
    submit_by_all(coordinator, allreduce_of("a", 1), {0}, 100.0 * step);
  }
  CHECK(coordinator.take_notices().empty());
}

TEST(stalls_are_those_that_have_waited_the_longest) {
  Coordinator coordinator = make_coordinator(3);
  for (int i = 0; i < 12; ++i) {
    const Request request = allreduce_of("n" + std::to_string(i), 1);
    CHECK_OK(coordinator.submit(1, request, kBegin + i * 1s));
  }
  Stalls stalls;
  stalls.find(coordinator, kBegin + 11s);
  const std::vector<Stall> found = stalls.get();
  CHECK_EQ(found.size(), Stalls::kMost);
  CHECK_EQ(found[0].name, std::string("n0"));
  CHECK_EQ(found[7].name, std::string("n7"));
  CHECK(found[0].since == kBegin);
  CHECK_EQ(found[0].submitted, std::vector<int>{1});
  CHECK_EQ(found[0].missing, std::vector<int>{0, 2});
  stalls.clear();
  CHECK(stalls.get().empty());
}

TEST(stalls_do_not_have_what_has_waited_for_a_moment) {
  Coordinator coordinator = make_coordinator(2);
  CHECK_OK(coordinator.submit(1, allreduce_of("a", 1), kBegin));
  Stalls stalls;
  stalls.find(coordinator, kBegin + 900ms);
  CHECK(stalls.get().empty());
}

}  // namespace
}  // namespace hvdlite::testing::steps
