// Deaths while ranks join, process sets come and go, and where something cannot be redone.
#include "elastic_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

// Submits the entry to the present engine and waits for it. False: the worker has died.
bool ends(ElasticJob::Worker& worker, const EntryPtr& entry) {
  const Status status = worker.engine().enqueue(entry, false);
  if (worker.dead) return false;
  CHECK_OK(status);
  return await(worker, entry);
}

struct JoinStep {
  float sum = 0;
  int epoch = -1;
  int members = 0;
};

// Steps of a worker, and then a join; twice. Each worker has steps of its own number.
void join_twice(const Hosts& hosts, const std::vector<Fault>& faults,
                const std::vector<int>& steps_of) {
  ElasticJob job(hosts, faults);
  std::map<int, std::vector<JoinStep>> logs;
  for (const auto& worker : job.workers()) logs[worker->number];
  job.run([&](ElasticJob::Worker& worker) {
    for (int round = 0; round < 2; ++round) {
      for (int step = 0; step < steps_of[static_cast<std::size_t>(worker.number)]; ++step) {
        std::vector<float> values = {static_cast<float>(worker.number + 1)};
        const EntryPtr entry = allreduce_entry("x" + std::to_string(step), values);
        if (!ends(worker, entry)) return;
        CHECK_OK(entry->completion->status());
        const Completion& end = *entry->completion;
        logs.at(worker.number).push_back({values[0], end.epoch, end.members});
      }
      const EntryPtr join = change_entry(Kind::kJoin, std::string(kJoinName));
      if (!ends(worker, join)) return;
      CHECK_OK(join->completion->status());
    }
  });
  CHECK_EQ(job.stuck(), std::string());
  for (const int worker : job.history().back()) {
    const int own = steps_of[static_cast<std::size_t>(worker)];
    CHECK_EQ(logs.at(worker).size(), static_cast<std::size_t>(2 * own));
    for (std::size_t i = 0; i < logs.at(worker).size(); ++i) {
      const JoinStep& step = logs.at(worker)[i];
      float sum = 0;
      int members = 0;
      for (const int other : job.history()[static_cast<std::size_t>(step.epoch)]) {
        const int number = static_cast<int>(i) % own;
        if (number >= steps_of[static_cast<std::size_t>(other)]) continue;
        sum += static_cast<float>(other + 1);
        ++members;
      }
      CHECK_EQ(step.sum, sum);
      CHECK_EQ(step.members, members);
    }
  }
}

std::vector<int> ranks_of(const std::vector<int>& workers, const std::vector<int>& members) {
  std::vector<int> ranks;
  for (const int worker : workers) {
    const auto at = std::find(members.begin(), members.end(), worker);
    ranks.push_back(static_cast<int>(at - members.begin()));
  }
  return ranks;
}

// Sums over a process set, whose id all workers know; the others do nothing.
void check_set(ElasticJob::Worker& worker, const std::vector<int>& workers, std::uint32_t set) {
  if (std::find(workers.begin(), workers.end(), worker.number) == workers.end()) return;
  float sum = 0;
  for (const int one : workers) sum += static_cast<float>(one + 1);
  std::vector<float> values = {static_cast<float>(worker.number + 1)};
  const EntryPtr entry = allreduce_entry("of a set", values);
  entry->request.process_set = set;
  CHECK(ends(worker, entry));
  CHECK_OK(entry->completion->status());
  CHECK_EQ(values[0], sum);
}

// Workers 0 and 2 of four get a process set, use it and remove it; worker 1 dies at some point.
void sets_come_and_go(const Hosts& hosts, const Fault& fault) {
  const std::vector<int> workers = {0, 2};
  ElasticJob job(hosts, {fault});
  std::map<int, std::vector<int>> ids;
  for (const auto& worker : job.workers()) ids[worker->number];
  job.run([&](ElasticJob::Worker& worker) {
    for (int round = 0; round < 2; ++round) {
      EntryPtr added;
      CHECK_OK(worker.submit(
          [&](const std::vector<int>& members) { return addition(ranks_of(workers, members)); },
          added));
      if (!await(worker, added)) return;
      CHECK_OK(added->completion->status());
      const int id = added->completion->set_id;
      ids.at(worker.number).push_back(id);
      check_set(worker, workers, static_cast<std::uint32_t>(id));
      const EntryPtr removed = removal(static_cast<std::uint32_t>(id));
      if (!ends(worker, removed)) return;
      CHECK_OK(removed->completion->status());
    }
  });
  CHECK_EQ(job.stuck(), std::string());
  for (const int worker : job.history().back()) {
    CHECK_EQ(ids.at(worker), ids.at(0));
    CHECK(ids.at(worker).at(0) < ids.at(worker).at(1));
  }
}

// All workers submit this entry, and one dies in it. It cannot be redone: all others get an error,
// and can go on after it.
void check_stuck(const std::function<EntryPtr(std::vector<float>&)>& make, Point point, int victim,
                 const std::string& reason) {
  ElasticJob job({0, 1, 0}, {{victim, point, 0, victim == 0 ? 1 : 0, 0}});
  job.run([&](ElasticJob::Worker& worker) {
    std::vector<float> values(6, 1.0F), after = {1};
    const EntryPtr entry = make(values);
    if (!ends(worker, entry)) return;
    CHECK_STATUS(entry->completion->status(), StatusCode::kRankFailed);
    CHECK(has(entry->completion->status().message(), reason));
    CHECK(soon([&] { return worker.engine().size() == 2; }));
    const EntryPtr next = allreduce_entry("after", after);
    CHECK(ends(worker, next));
    CHECK_EQ(after[0], 2.0F);
  });
  CHECK(has(job.stuck(), reason));
}

}  // namespace

TEST(elastic_ranks_die_while_others_have_joined) {
  for (const Hosts& hosts : std::vector<Hosts>{{0, 0, 0}, {0, 1, 0, 1}}) {
    std::vector<int> steps;
    for (std::size_t i = 0; i < hosts.size(); ++i) steps.push_back(2 + 2 * static_cast<int>(i));
    for (int victim = 1; victim < static_cast<int>(hosts.size()); ++victim) {
      for (int at = 0; at < 2 * steps[static_cast<std::size_t>(victim)]; ++at) {
        join_twice(hosts, {{victim, Point::kBeforeBatch, at}}, steps);
        join_twice(hosts, {{victim, Point::kBeforeCommit, at}}, steps);
      }
    }
  }
}

TEST(elastic_join_is_handed_out_by_all_or_redone) {
  for (const Hosts& hosts : std::vector<Hosts>{{0, 0, 0}, {0, 1, 1}}) {
    for (const Point point : {Point::kBeforeCommit, Point::kCommitByOne, Point::kAfterCommit}) {
      for (int at = 1; at < 5; ++at) {
        join_twice(hosts, {{0, point, at, 1}}, {2, 2, 2});
        join_twice(hosts, {{2, point, at, 0}, {0, point, at, 1, 1}}, {2, 2, 2});
      }
    }
  }
}

TEST(elastic_process_sets_come_and_go_while_a_rank_dies) {
  for (const Hosts& hosts : std::vector<Hosts>{{0, 0, 0, 0}, {0, 1, 0, 1}}) {
    // Worker 1 takes part in the additions and the removals, but not in what the set does.
    for (int at = 0; at < 4; ++at) sets_come_and_go(hosts, {1, Point::kBeforeCommit, at});
  }
}

TEST(elastic_process_set_goes_on_by_new_numbers_and_one_that_lost_a_member_ends) {
  ElasticJob job({0, 0, 1, 1}, {{1, Point::kBeforeCommit, 2}});
  job.run([&](ElasticJob::Worker& worker) {
    std::vector<std::uint32_t> ids;
    for (const auto& ranks : {std::vector<int>{2, 3}, std::vector<int>{0, 1}}) {
      const EntryPtr entry = addition(ranks);
      CHECK(ends(worker, entry));
      ids.push_back(static_cast<std::uint32_t>(entry->completion->set_id));
    }
    std::vector<float> values = {1};
    if (!ends(worker, allreduce_entry("x", values))) return;
    CHECK_EQ(values[0], 3.0F);
    CHECK(worker.engine().process_set(ids[1]) == nullptr);
    CHECK_EQ(worker.engine().process_set(ids[0])->ranks, std::vector<int>{1, 2});
    check_set(worker, {2, 3}, ids[0]);
    std::vector<float> lost = {1};
    EntryPtr broken = allreduce_entry("broken", lost);
    broken->request.process_set = ids[1];
    CHECK_STATUS(worker.engine().enqueue(broken, false), StatusCode::kRankFailed);
    // The ids of sets that ended are not given out again.
    const EntryPtr next = addition({0, 2});
    CHECK(ends(worker, next));
    CHECK(next->completion->set_id > static_cast<int>(ids[1]));
  });
}

TEST(elastic_removed_set_fails_the_transactions_that_it_holds) {
  ElasticJob job({0, 0}, {});
  job.run([&](ElasticJob::Worker& worker) {
    const EntryPtr added = addition({1}, "alone");
    const EntryPtr other = addition({0}, "alone too");
    CHECK(ends(worker, added));
    CHECK(ends(worker, other));
    const int own = worker.number == 1 ? added->completion->set_id : other->completion->set_id;
    std::vector<float> values = {1}, single = {1};
    const EntryPtr held = allreduce_entry("held", values);
    const EntryPtr done = allreduce_entry("done", single);
    held->request.process_set = done->request.process_set = static_cast<std::uint32_t>(own);
    held->request.transaction = "step";
    CHECK_OK(worker.engine().enqueue(held, false));
    CHECK_OK(worker.engine().enqueue(done, false));
    CHECK(ends(worker, removal(static_cast<std::uint32_t>(added->completion->set_id), "r1")));
    CHECK(ends(worker, removal(static_cast<std::uint32_t>(other->completion->set_id), "r2")));
    CHECK(await(worker, held));
    CHECK(await(worker, done));
    CHECK_OK(done->completion->status());
    CHECK_STATUS(held->completion->status(), StatusCode::kInvalidArgument);
    CHECK(has(held->completion->status().message(), "transaction 'step'"));
  });
}

TEST(elastic_what_cannot_be_redone_fails_on_all) {
  for (const Point point : {Point::kBeforeBatch, Point::kBeforeCommit}) {
    for (const int victim : {0, 2}) {
      for (const Kind kind : {Kind::kAlltoall, Kind::kReducescatter}) {
        check_stuck([&](std::vector<float>& values) { return rows_entry(kind, "rows", values); },
                    point, victim, "whose parts depend on the ranks that are gone");
      }
      check_stuck(
          [&](std::vector<float>& values) {
            EntryPtr entry = allreduce_entry("b", values);
            entry->request.kind = Kind::kBroadcast;
            entry->request.root = victim;
            return entry;
          },
          point, victim, "and its root, rank " + std::to_string(victim) + ", is gone");
    }
  }
  for (const int victim : {0, 2}) {
    check_stuck([&](std::vector<float>&) { return addition({std::min(victim, 1), 2}); },
                Point::kBeforeCommit, victim, "of its process set is gone");
  }
}
