// When a roll closes, and without whom; and what the coordinator makes of it.
#include "check.h"
#include "coordinators.h"
#include "negotiation/roll.h"

namespace hvdlite::testing::roll {
using namespace std::chrono_literals;

RollCall call_of(std::uint32_t quorum, std::chrono::microseconds grace = 0us,
                 std::uint32_t bound = 2) {
  return {"roll", 0, quorum, grace.count(), bound, true};
}

const Presence kAll = {true, true, true};

// A roll of three members that have had one step of one name.
Roll begun(const RollCall& call) {
  Roll roll(3);
  for (std::size_t member = 0; member < 3; ++member) {
    CHECK(!roll.catch_up("a", member));
    roll.arrive("a", member, call, /*cached=*/false);
  }
  CHECK(roll.close(kStart));
  CHECK(roll.complete("a", kAll));
  CHECK(roll.answer("a", kAll) == Presence(3));
  return roll;
}

TEST(roll_waits_for_all_where_a_request_is_not_cached) {
  Roll roll(2);
  roll.arrive("a", 0, call_of(1), /*cached=*/false);
  CHECK(!roll.close(kStart + 1h));
  CHECK(!roll.due());
  roll.arrive("a", 1, call_of(1), /*cached=*/true);
  CHECK(roll.close(kStart + 1h));
}

TEST(roll_closes_when_grace_has_passed_since_the_quorum) {
  const RollCall call = call_of(2, 10ms);
  Roll roll = begun(call);
  roll.arrive("a", 2, call, true);
  CHECK(!roll.close(kStart + 1s));
  CHECK(!roll.due());
  roll.arrive("a", 0, call, true);
  CHECK(!roll.close(kStart + 2s));
  CHECK(roll.due() == kStart + 2s + 10ms);
  CHECK(!roll.close(kStart + 2s + 9ms));
  CHECK(roll.close(kStart + 2s + 10ms));
  CHECK(!roll.due());
  CHECK(roll.complete("a", {true, false, true}));
  CHECK(!roll.awaits("a", 1));
  CHECK(roll.answer("a", {true, false, true}) == Presence({false, true, false}));
  CHECK(roll.catch_up("a", 1));
  CHECK(!roll.catch_up("a", 1));
}

TEST(roll_closes_at_once_when_all_are_in) {
  const RollCall call = call_of(1, 1h);
  Roll roll = begun(call);
  for (std::size_t member = 0; member < 3; ++member) {
    CHECK(!roll.close(kStart));
    roll.arrive("a", member, call, true);
  }
  CHECK(roll.close(kStart));
}

TEST(roll_waits_for_a_member_that_is_at_the_bound) {
  const RollCall call = call_of(1, 0us, /*bound=*/2);
  Roll roll = begun(call);
  for (int step = 0; step < 2; ++step) {
    roll.arrive("a", 0, call, true);
    roll.arrive("a", 1, call, true);
    CHECK(roll.close(kStart));
    CHECK(roll.answer("a", {true, true, false}) == Presence({false, false, true}));
  }
  roll.arrive("a", 0, call, true);
  CHECK(!roll.close(kStart + 1h));
  CHECK(!roll.due());
  CHECK(roll.catch_up("a", 2));
  CHECK(roll.close(kStart + 1h));
}

// The roll was closed at the first name: a member that comes in time for the second one is late.
TEST(roll_is_one_for_all_names_of_a_step) {
  const RollCall call = call_of(2);
  Roll roll = begun(call);
  roll.arrive("a", 0, call, true);
  roll.arrive("a", 1, call, true);
  CHECK(roll.close(kStart));
  CHECK(roll.answer("a", {true, true, false}) == Presence({false, false, true}));
  RollCall second = call;
  second.step = 1;
  roll.arrive("b", 2, second, true);
  roll.arrive("b", 0, second, true);
  CHECK(!roll.close(kStart));
  CHECK(!roll.complete("b", {true, false, true}));
  CHECK(roll.awaits("b", 1));
  roll.arrive("b", 1, second, true);
  CHECK(roll.complete("b", kAll));
  CHECK(roll.answer("b", kAll) == Presence({false, false, true}));
  CHECK(!roll.catch_up("b", 2));  // it had submitted it already
  CHECK(roll.catch_up("a", 2));
}

TEST(roll_does_not_wait_for_members_that_have_joined) {
  const RollCall call = call_of(3, 1h);
  Roll roll = begun(call);
  roll.arrive("a", 0, call, true);
  roll.arrive("a", 1, call, true);
  CHECK(!roll.close(kStart));
  roll.join(2);
  CHECK(roll.close(kStart));
  CHECK(roll.complete("a", {true, true, false}));
  CHECK(roll.answer("a", {true, true, false}) == Presence(3));  // absent, not late
  roll.return_all();
  CHECK(roll.awaits("a", 2));
}

// A quorum of 2 in 3 is one of 2 in 2 active members, rounded up.
TEST(roll_takes_its_quorum_of_those_that_have_not_joined) {
  const RollCall call = call_of(2);
  Roll roll = begun(call);
  roll.join(2);
  roll.arrive("a", 0, call, true);
  CHECK(!roll.close(kStart + 1h));
  roll.arrive("a", 1, call, true);
  CHECK(roll.close(kStart + 1h));
}

TEST(roll_waits_for_its_quorum_again_when_one_that_is_in_joins) {
  const RollCall call = call_of(2, 1s);
  Roll roll = begun(call);
  roll.arrive("a", 0, call, true);
  roll.arrive("a", 1, call, true);
  CHECK(!roll.close(kStart));
  CHECK(roll.due() == kStart + 1s);
  roll.join(1);
  CHECK(!roll.close(kStart));
  CHECK(!roll.due());
  CHECK(!roll.close(kStart + 1h));
  roll.arrive("a", 2, call, true);
  CHECK(roll.close(kStart + 1h));
}

TEST(roll_stays_small) {
  const RollCall call = call_of(1);
  Roll roll = begun(call);
  for (int step = 0; step < 10; ++step) {
    roll.arrive("a", 0, call, true);
    CHECK_EQ(roll.close(kStart), step < 2);
    if (step >= 2) break;
    (void)roll.answer("a", {true, false, false});
  }
  CHECK(roll.steps() <= 4);
}

Request rolled(const std::string& name, const RollCall& call) {
  Request request = allreduce_of(name, 4);
  request.op = ReduceOp::kAverage;
  request.weighted = true;
  request.roll = call;
  return request;
}

TEST(coordinator_names_late_ranks_and_lets_them_catch_up) {
  Coordinator coordinator = make_coordinator(3);
  const Request request = rolled("a", call_of(2, 5ms));
  for (int rank = 0; rank < 3; ++rank) CHECK_OK(coordinator.submit(rank, request, kStart));
  auto responses = coordinator.take_responses();
  CHECK_EQ(responses.size(), std::size_t{1});
  CHECK(responses[0].late.empty());
  CHECK(coordinator.rolls());
  CHECK(!coordinator.rolls_due());
  CHECK_OK(coordinator.submit(2, request, kStart));
  CHECK_OK(coordinator.submit(0, request, kStart));
  CHECK(coordinator.take_responses().empty());
  CHECK(coordinator.rolls_due() == kStart + 5ms);
  coordinator.close_rolls(kStart + 5ms);
  responses = coordinator.take_responses();
  CHECK_EQ(responses.size(), std::size_t{1});
  CHECK_EQ(responses[0].late, std::vector<int>{1});
  CHECK(responses[0].absent.empty());
  CHECK(coordinator.idle());
  CHECK_OK(coordinator.submit(1, request, kStart));  // of that step
  CHECK(coordinator.idle());
  CHECK_OK(coordinator.submit(1, request, kStart));  // of the next one
  CHECK(!coordinator.idle());
}

TEST(coordinator_answers_only_what_is_complete_when_a_roll_closes) {
  Coordinator coordinator = make_coordinator(3);
  const Request a = rolled("a", call_of(2));
  const Request b = rolled("b", call_of(2));
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_OK(coordinator.submit(rank, a, kStart));
    CHECK_OK(coordinator.submit(rank, b, kStart));
  }
  CHECK_EQ(coordinator.take_responses().size(), std::size_t{2});
  CHECK_OK(coordinator.submit(0, a, kStart));
  CHECK_OK(coordinator.submit(1, b, kStart));  // the quorum, of two names
  CHECK(coordinator.take_responses().empty());
  const auto& table = coordinator.tables().at(0);
  CHECK_EQ(coordinator.missing_ranks(table, table.tensors.at("0:a")), std::vector<int>{1});
  CHECK_OK(coordinator.submit(2, a, kStart));  // too late, also for b
  CHECK_OK(coordinator.submit(1, a, kStart));
  auto responses = coordinator.take_responses();
  CHECK_EQ(responses.size(), std::size_t{1});
  CHECK_EQ(responses[0].late, std::vector<int>{2});
  CHECK_OK(coordinator.submit(0, b, kStart));
  responses = coordinator.take_responses();
  CHECK_EQ(responses.size(), std::size_t{1});
  CHECK_EQ(responses[0].late, std::vector<int>{2});
}

}  // namespace hvdlite::testing::roll
