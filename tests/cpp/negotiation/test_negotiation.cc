// The pure parts of the engine: coordinator, response cache, fusion plan, stall monitor.
#include "check.h"
#include "coordinators.h"
#include "engine/executor.h"
#include "negotiation/coordinator.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

Agreed agreed(const Request& request) {
  auto entry = std::make_shared<Entry>();
  entry->request = request;
  return {entry, {}, {}, 0};
}

}  // namespace

TEST(coordinator_gives_a_changed_shape_the_same_cache_id_and_tells_it_in_full) {
  Coordinator coordinator = make_coordinator(2);
  const auto step = [&](std::int64_t count) {
    CHECK_OK(coordinator.submit(0, allreduce_of("a", count), kStart));
    CHECK_OK(coordinator.submit(1, allreduce_of("a", count), kStart));
    return coordinator.take_responses().at(0);
  };
  const Response first = step(4);
  const Response second = step(5);
  CHECK(second.form == Response::Form::kFull);
  CHECK_EQ(first.cache_id, second.cache_id);
  CHECK(step(5).form == Response::Form::kCached);
}

TEST(coordinator_with_a_full_cache_goes_on_in_full) {
  Coordinator coordinator = make_coordinator(1, 1);
  CHECK_OK(coordinator.submit(0, allreduce_of("a", 4), kStart));
  CHECK_OK(coordinator.submit(0, allreduce_of("b", 4), kStart));
  const auto responses = coordinator.take_responses();
  CHECK_EQ(responses[0].cache_id, 0u);
  CHECK_EQ(responses[1].cache_id, kNotCached);
}

TEST(response_cache_gives_the_id_of_a_removed_set_to_one_request_only) {
  ResponseCache cache(quiet_config(2));
  cache.remember(cache.assign("a"), "a", allreduce_of("a", 4, 1));
  cache.forget(1);
  const Request b = allreduce_of("b", 4);
  const Request c = allreduce_of("c", 4);
  cache.remember(cache.assign("b"), "b", b);
  cache.remember(cache.assign("c"), "c", c);
  CHECK(cache.find("b", b).has_value());
  CHECK(cache.find("c", c).has_value());
}

TEST(coordinator_refuses_a_cache_id_that_was_never_given_out) {
  Coordinator coordinator = make_coordinator(2);
  CHECK_STATUS(coordinator.submit_cached(1, 5, kStart), StatusCode::kInternal);
}

TEST(coordinator_refuses_what_only_a_broken_rank_can_ask_for) {
  const auto make = [] {
    Coordinator coordinator = make_coordinator(4);
    coordinator.add_set({1, {1, 2}, 0, 0});
    return coordinator;
  };
  const auto refused = [&](Kind kind, std::uint32_t set, int root) {
    Coordinator coordinator = make();
    Request request = allreduce_of("a", 4, set);
    request.kind = kind;
    request.root = root;
    request.ranks = {1, 2};
    for (const int rank : {1, 2}) {
      const Status status = coordinator.submit(rank, request, kStart);
      CHECK_STATUS(status, StatusCode::kInternal);
      CHECK(status.message().find("rank " + std::to_string(rank) + " submitted ") == 0);
    }
    CHECK(coordinator.take_responses().empty());
    CHECK(coordinator.idle());
  };
  for (const int root : {-1, 0, 3, 4, INT32_MAX, INT32_MIN}) refused(Kind::kBroadcast, 1, root);
  for (const int root : {-1, 4}) refused(Kind::kBroadcast, 0, root);
  for (const Kind kind : {Kind::kJoin, Kind::kAddProcessSet, Kind::kRemoveProcessSet}) {
    refused(kind, 1, -1);
  }
}

TEST(coordinator_does_not_wait_for_a_rank_that_joined_and_then_left) {
  Coordinator coordinator = make_coordinator(3);
  const Request join = join_request();
  CHECK_OK(coordinator.submit(0, allreduce_of("a", 4), kStart));
  CHECK_OK(coordinator.submit(1, join, kStart));
  coordinator.leave(1, 20);
  CHECK(coordinator.take_responses().empty());
  CHECK_OK(coordinator.submit(2, allreduce_of("a", 4), kStart));
  CHECK_EQ(coordinator.take_responses().at(0).absent, (std::vector<int>{1}));
}

TEST(coordinator_keeps_one_order_over_several_process_sets) {
  Coordinator coordinator = make_coordinator(3);
  Group pair;
  pair.id = 1;
  pair.ranks = {1, 2};
  coordinator.add_set(pair);
  CHECK_OK(coordinator.submit(1, allreduce_of("a", 4, 1), kStart));
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_OK(coordinator.submit(rank, allreduce_of("a", 4), kStart));
  }
  CHECK_OK(coordinator.submit(2, allreduce_of("a", 4, 1), kStart));
  const auto responses = coordinator.take_responses();
  CHECK_EQ(responses.at(0).request.process_set, 0u);
  CHECK_EQ(responses.at(1).request.process_set, 1u);
  CHECK_STATUS(coordinator.submit(0, allreduce_of("b", 4, 1), kStart), StatusCode::kInternal);
}

TEST(stall_monitor_names_tensors_missing_ranks_and_their_last_activity) {
  Stalling stalling(3, /*shutdown=*/0);
  Coordinator& coordinator = stalling.coordinator;
  CHECK_OK(coordinator.submit(1, allreduce_of("early", 4), kStart));
  CHECK_OK(coordinator.submit(0, allreduce_of("late", 4), kStart + 1s));
  CHECK(stalling.monitor.check(kStart + 9s).empty());
  const auto warnings = stalling.monitor.check(kStart + 11s);
  CHECK_EQ(warnings.size(), std::size_t{2});
  std::string all = warnings[0].text + warnings[1].text;
  for (const auto& warning : warnings) {
    const bool early = warning.name == "early";
    CHECK(early || warning.name == "late");
    CHECK_EQ(warning.rank, early ? 0 : 1);
  }
  CHECK(all.find("'late'") != std::string::npos);
  CHECK(has(all,
            "rank 0 is in allreduce 'late'; rank 1 (last called 'early' 11.0 s ago), rank 2 (has "
            "called nothing yet) have not called it for 10.0 s"));
  CHECK(stalling.monitor.check(kStart + 12s).empty());
}

TEST(stall_monitor_warns_less_and_less_often) {
  Stalling stalling(2);
  Coordinator& coordinator = stalling.coordinator;
  CHECK_OK(coordinator.submit(0, allreduce_of("a", 4), kStart));
  std::vector<int> warned;
  for (int second = 1; second < 200; ++second) {
    if (!stalling.monitor.check(kStart + std::chrono::seconds(second)).empty())
      warned.push_back(second);
  }
  CHECK(warned == (std::vector<int>{10, 20, 40, 80, 160}));
}

TEST(stall_monitor_says_join_where_ranks_wait_for_each_other) {
  Stalling stalling(3);
  Coordinator& coordinator = stalling.coordinator;
  CHECK_OK(coordinator.submit(0, allreduce_of("end of epoch", 4), kStart));
  CHECK_OK(coordinator.submit(1, allreduce_of("gradient", 4), kStart + 5s));
  const auto first = stalling.monitor.check(kStart + 10s);
  CHECK_EQ(first.size(), std::size_t{1});
  CHECK(first[0].text.find(
            "; rank 1 waits for rank 0 in allreduce 'gradient': if ranks have different "
            "numbers of steps, end the loop on every rank with hvd.join()") != std::string::npos);
  const Request join = join_request();
  CHECK_OK(coordinator.submit(2, join, kStart + 11s));
  for (const auto& warning : stalling.monitor.check(kStart + 40s)) {
    // Nobody waits for a rank that has joined.
    CHECK(warning.text.find("rank 2 (") == std::string::npos);
  }
}

TEST(stall_monitor_says_who_is_waited_for_in_a_send_and_gives_up) {
  Stalling stalling(3, /*shutdown=*/12);
  Request send = allreduce_of("x", 4);
  send.kind = Kind::kSend;
  send.ranks = {1, 2};
  CHECK_OK(stalling.coordinator.submit(1, send, kStart));
  const auto warnings = stalling.monitor.check(kStart + 11s);
  CHECK_EQ(warnings.size(), std::size_t{1});
  CHECK(has(warnings.at(0).text,
            "rank 1 is in send 'x' from rank 1 to rank 2; rank 2 (has called nothing yet) has not "
            "called it for "));
  (void)stalling.monitor.check(kStart + 12s);
  const Status error = stalling.coordinator.take_responses().at(0).error;
  CHECK_STATUS(error, StatusCode::kStalled);
  CHECK_EQ(error.failed_rank(), 2);
}

TEST(fusion_plan_keeps_dtypes_ops_sets_and_kinds_apart) {
  std::vector<Agreed> round;
  Request request = allreduce_of("a", 10);
  round.push_back(agreed(request));
  request.tensors[0].dtype = DataType::kInt32;
  round.push_back(agreed(request));
  request = allreduce_of("b", 10);
  request.op = ReduceOp::kMax;
  round.push_back(agreed(request));
  round.push_back(agreed(allreduce_of("c", 10, 1)));
  request = allreduce_of("d", 10);
  request.kind = Kind::kBroadcast;
  round.push_back(agreed(request));
  round.push_back(agreed(allreduce_of("e", 10)));
  const auto batches = plan_batches(round, 1 << 20);
  CHECK_EQ(batches.size(), std::size_t{5});
  CHECK_EQ(batches[0].tensors.size(), std::size_t{2});  // "a" and "e"
}

TEST(fusion_plan_gives_a_tensor_above_the_threshold_its_own_batch) {
  std::vector<Agreed> round;
  round.push_back(agreed(allreduce_of("small", 1)));
  round.push_back(agreed(allreduce_of("large", 1000)));
  round.push_back(agreed(allreduce_of("tiny", 1)));
  const auto batches = plan_batches(round, 100);
  CHECK_EQ(batches.size(), std::size_t{2});
  CHECK_EQ(batches[0].tensors.size(), std::size_t{2});
}

// With a batch for each this took a minute and a half: each looked at all batches before it.
TEST(fusion_plan_of_many_tensors_that_do_not_fit_together_is_quick) {
  Request request = allreduce_of("a", 10);
  request.tensors.resize(200'000, request.tensors[0]);
  const std::vector<Agreed> round = {agreed(request)};
  for (const std::uint64_t threshold : {0, 39, 79}) {
    CHECK_EQ(plan_batches(round, threshold).size(), std::size_t{200'000});
  }
  CHECK_EQ(plan_batches(round, 80).size(), std::size_t{100'000});
}

TEST(stall_monitor_lets_ranks_train_while_others_have_joined) {
  Stalling stalling(2, /*shutdown=*/30);
  Coordinator& coordinator = stalling.coordinator;
  const Request join = join_request();
  CHECK_OK(coordinator.submit(0, join, kStart));
  for (int second = 5; second <= 60; second += 5) {
    CHECK_OK(coordinator.submit(1, allreduce_of("a", 4), kStart + std::chrono::seconds(second)));
    CHECK(stalling.monitor.check(kStart + std::chrono::seconds(second + 4)).empty());
  }
  coordinator.take_responses();
  const auto warnings = stalling.monitor.check(kStart + 71s);
  CHECK_EQ(warnings.size(), std::size_t{1});
  CHECK(warnings[0].text.find("rank 0 is in join(); rank 1 (last called 'a' 11.0 s ago) has ") ==
        0);
  (void)stalling.monitor.check(kStart + 90s);
  CHECK_STATUS(coordinator.take_responses().at(0).error, StatusCode::kStalled);
}

TEST(fusion_plan_keeps_generations_of_a_group_apart) {
  std::vector<Agreed> round;
  for (const std::uint32_t generation : {0u, 1u, 1u}) {
    round.push_back(agreed(allreduce_of("a", 10)));
    round.back().generation = generation;
  }
  const auto batches = plan_batches(round, 1 << 20);
  CHECK_EQ(batches.size(), std::size_t{2});
  CHECK_EQ(batches[1].tensors.size(), std::size_t{2});
}
