// When a step with late gradients closes, and without whom; and what the coordinator makes of it.
#include "check.h"
#include "coordinators.h"
#include "negotiation/late_gradients.h"
#include "negotiation/step_clock.h"

namespace hvdlite::testing::late_gradients {
using namespace std::chrono_literals;

LateTerms call_of(std::uint32_t quorum, std::chrono::microseconds grace = 0us,
                  std::uint32_t bound = 2) {
  return {"roll", 0, quorum, grace.count(), bound, true};
}

const Presence kAll = {true, true, true};

// Participation of three members that have had one step of one name.
Participation begun(const LateTerms& call) {
  Participation members(3);
  for (std::size_t member = 0; member < 3; ++member) {
    CHECK(!members.catch_up("a", member));
    members.arrive("a", member, call, /*cached=*/false);
  }
  CHECK(members.close(kStart));
  CHECK(members.complete("a", kAll));
  CHECK(members.answer("a", kAll) == Presence(3));
  return members;
}

TEST(participation_waits_for_its_quorum_again_when_one_that_is_in_joins) {
  const LateTerms call = call_of(2, 1s);
  Participation members = begun(call);
  members.arrive("a", 0, call, true);
  members.arrive("a", 1, call, true);
  CHECK(!members.close(kStart));
  CHECK(members.due() == kStart + 1s);
  members.join(1);
  CHECK(!members.close(kStart));
  CHECK(!members.due());
  CHECK(!members.close(kStart + 1h));
  members.arrive("a", 2, call, true);
  CHECK(members.close(kStart + 1h));
}

Request late_request(const std::string& name, const LateTerms& call) {
  Request request = allreduce_of(name, 4);
  request.op = ReduceOp::kAverage;
  request.weighted = true;
  request.late = call;
  return request;
}

// Submits an all-reduce on these ranks, each a millisecond after the one before.
void submit_late(Coordinator& coordinator, const std::vector<int>& ranks,
                 Coordinator::TimePoint at) {
  const Request request = late_request("a", call_of(2, 40ms, /*bound=*/4));
  for (const int rank : ranks) {
    at += 1ms;
    CHECK_OK(coordinator.submit(rank, request, at, {at, at, false}));
  }
}

constexpr Coordinator::TimePoint kBegin = kStart + 1h;

TEST(step_clock_has_a_late_rank_be_late_until_its_step_closes) {
  StepClock clock(3, 0);
  Coordinator coordinator(3, quiet_config(), {nullptr, &clock});
  submit_late(coordinator, {0, 1, 2}, kBegin);
  (void)coordinator.take_responses();
  for (int step = 1; step < 4; ++step) {
    submit_late(coordinator, {0, 1}, kBegin + step * 100ms);
    coordinator.tick(kBegin + step * 100ms + 41ms);  // of grace since the quorum, 39 ms
    CHECK(coordinator.take_responses().empty());
    coordinator.tick(kBegin + step * 100ms + 50ms);
    CHECK_EQ(coordinator.take_responses().size(), std::size_t{1});
  }
  const StepClock::Report report = clock.report();
  CHECK_EQ(report.steps, 2U);
  CHECK_EQ(report.ranks[2].last, 2U);
  CHECK(report.ranks[2].late_between == 2ms + 49ms);
  CHECK(report.ranks[0].waiting == 2ms + 49ms);
  for (const StepClock::Rank& rank : report.ranks) {
    CHECK(rank.backward + rank.waiting + rank.communicating + rank.between > 0ms);
  }
}

TEST(late_terms_without_a_quorum_a_bound_or_a_time_are_refused) {
  const auto travels = [](const LateTerms& call) {
    Submit submit;
    submit.requests = {late_request("a", call)};
    const Bytes frame = encode_submit(submit);
    Submit read;
    return decode_submit(std::span(frame).subspan(5), read);
  };
  CHECK(travels({"key", 0, 1, 0, 1, true}));
  for (const LateTerms& bad :
       {LateTerms{"key", 0, 0, 0, 1, true}, LateTerms{"key", 0, 1, 0, 0, true},
        LateTerms{"key", 0, 1, -1, 1, true}, LateTerms{"key", 0, 1, kMaxGraceUs + 1, 1, true}}) {
    CHECK(!travels(bad));
  }
}

}  // namespace hvdlite::testing::late_gradients
