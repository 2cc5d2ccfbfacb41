// The lines of StepClock: which rank is late, in steps that are made up.
#include <string>
#include <vector>

#include "check.h"
#include "coordinators.h"
#include "negotiation/step_clock.h"

namespace hvdlite::testing {
namespace {

using TimePoint = StepClock::TimePoint;

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

}  // namespace
}  // namespace hvdlite::testing
