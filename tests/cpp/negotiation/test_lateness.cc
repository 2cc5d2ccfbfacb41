// Lateness: which rank is late, in steps that are made up.
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "coordinators.h"
#include "negotiation/step_clock/step_clock.h"

namespace hvdlite::testing {
namespace {

using TimePoint = Lateness::TimePoint;

TimePoint at(double milliseconds) {
  return kStart + std::chrono::hours(1) +
         std::chrono::duration_cast<TimePoint::duration>(
             std::chrono::duration<double, std::milli>(milliseconds));
}

Arrival alone(TimePoint when) { return {when, when}; }

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

bool near(double a, double b) { return std::abs(a - b) < 1e-6; }

TEST(lateness_names_the_rank_that_is_late_and_by_how_much) {
  StepClock clock(3, 0.99);
  make_steps(clock, 0, 19, {0, 0.1, 4}, {0.1, 0, 6});
  CHECK(!clock.lateness().take_line());
  make_steps(clock, 19, 3, {0, 0.1, 4}, {0.1, 0, 6});
  const Lateness::Report report = clock.lateness().report();
  CHECK_EQ(report.steps, 21U);
  CHECK(near(report.step_seconds, 0.05));
  CHECK(near(report.ranks[2].late, 5.9e-3));
  CHECK(near(report.ranks[2].before_backward, 3.9e-3));
  CHECK(near(report.ranks[2].last, 1));
  CHECK(near(report.ranks[0].last, 0));
  const auto line = clock.lateness().take_line();
  CHECK(line.has_value());
  CHECK_EQ(line->rank, 2);
  CHECK_EQ(line->text,
           std::string("rank 2 was last in 100 % of 20 steps, 5.9 ms (12 % of a step) after "
                       "the median, 3.9 ms of it before backward: look at its input, its "
                       "forward pass and its links"));
  CHECK(!clock.lateness().take_line());
}

TEST(lateness_of_two_ranks_is_after_the_other_one) {
  StepClock clock(2, 0);
  make_steps(clock, 0, 11, {0, 0}, {8, 0});
  const Lateness::Report report = clock.lateness().report();
  CHECK(near(report.ranks[0].late, 8e-3));
  CHECK(near(report.ranks[1].late, 0));
  CHECK(near(report.ranks[0].before_backward, 0));
}

TEST(lateness_stays_when_a_later_all_reduce_finds_all_ranks_together) {
  StepClock clock(2, 0);
  make_steps(clock, 0, 11, {0, 9}, {0, 0});
  CHECK(near(clock.lateness().report().ranks[1].late, 9e-3));
}

TEST(lateness_writes_no_line_where_no_rank_stands_out) {
  StepClock in_turn(2, 1.0);
  for (int step = 0; step < 100; ++step) {
    const double even = step % 2 == 0 ? 20 : 0;
    make_steps(in_turn, step, 1, {0, 0}, {even, 20 - even});
    CHECK(!in_turn.lateness().take_line());
  }
  StepClock slightly(2, 1.0);
  make_steps(slightly, 0, 100, {0, 4}, {0, 4});
  CHECK(!slightly.lateness().take_line());
  StepClock silent(2, 0);
  make_steps(silent, 0, 100, {0, 40}, {0, 40});
  CHECK(!silent.lateness().take_line());
}

TEST(lateness_forgets_what_is_long_ago) {
  StepClock clock(2, 0);
  make_steps(clock, 0, 1000, {0, 0}, {0, 10});
  make_steps(clock, 1000, 1000, {0, 0}, {10, 0});
  const Lateness::Report report = clock.lateness().report();
  CHECK(report.ranks[1].last < 0.01);
  CHECK(report.ranks[0].last > 0.99);
}

TEST(lateness_without_repetitions_has_no_steps) {
  StepClock clock(2, 0);
  for (int i = 0; i < 10'000; ++i) {
    clock.arrived("n" + std::to_string(i), std::vector<Arrival>{alone(at(i)), alone(at(i))}, true);
  }
  CHECK_EQ(clock.lateness().report().steps, 0U);
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
  StepClock clock(2, 0);
  Coordinator coordinator(2, 100);
  coordinator.add(clock);
  coordinator.add_set(world_of(2));
  for (int step = 0; step < 3; ++step) {
    submit_by_all(coordinator, allreduce_of("#once", 1), {0, 1}, 100.0 * step);
    submit_by_all(coordinator, allreduce_of("a", 1), {1, 0}, 100.0 * step + 10);
    (void)coordinator.take_responses();
  }
  const Lateness::Report report = clock.lateness().report();
  CHECK_EQ(report.steps, 2U);
  CHECK(near(report.ranks[0].late, 4e-3));
  CHECK(near(report.ranks[1].last, 0));
}

TEST(coordinator_tells_no_arrivals_while_a_rank_has_joined) {
  StepClock clock(2, 0);
  Coordinator coordinator(2, 100);
  coordinator.add(clock);
  coordinator.add_set(world_of(2));
  Request join;
  join.kind = Kind::kJoin;
  join.name = "#join";
  CHECK(coordinator.submit(1, join, at(0)).ok());
  for (int step = 0; step < 3; ++step) {
    submit_by_all(coordinator, allreduce_of("a", 1), {0}, 100.0 * step);
  }
  CHECK_EQ(clock.lateness().report().steps, 0U);
}

}  // namespace
}  // namespace hvdlite::testing
