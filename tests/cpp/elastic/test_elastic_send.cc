// Sends in elastic jobs: both ranks hand a send out, or both redo it; where one of them is gone,
// the other gets an error.
#include <atomic>

#include "cpp/engine/send_entries.h"
#include "elastic_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

const std::vector<Hosts> kThreeWorkers = {{0, 0, 0}, {0, 1, 1}, {0, 1, 0}};

int rank_in(const std::vector<int>& members, int worker) {
  return static_cast<int>(std::find(members.begin(), members.end(), worker) - members.begin());
}

// Submits worker `from`'s send of this step to worker `to`, on either of the two.
EntryPtr submit_step(ElasticJob::Worker& worker, int step, int from, int to,
                     std::vector<float>& data) {
  EntryPtr entry;
  CHECK_OK(worker.submit(
      [&](const std::vector<int>& members) {
        return send_entry("step" + std::to_string(step), rank_in(members, from),
                          rank_in(members, to), data);
      },
      entry));
  return entry;
}

// Two workers pass numbers to each other while a third one dies at a moment of its own.
void pass_numbers(const Hosts& hosts, int victim, int after) {
  constexpr int kSteps = 40;
  std::vector<int> pair;
  for (int worker = 0; worker < 3; ++worker) {
    if (worker != victim) pair.push_back(worker);
  }
  std::atomic<int> passed{0};
  ElasticJob job(hosts, {});
  job.run([&](ElasticJob::Worker& worker) {
    if (worker.number == victim) {
      CHECK(soon([&] { return passed.load() >= after; }));
      worker.engine().abort("this worker dies");
      worker.dead = true;
      return;
    }
    for (int step = 0; step < kSteps; ++step) {
      const int from = pair[static_cast<std::size_t>(step % 2)];
      const int to = pair[static_cast<std::size_t>(1 - step % 2)];
      const std::size_t count = step % 4 == 3 ? 150000 : 3;
      const auto value = static_cast<float>(step);
      std::vector<float> data(count, worker.number == from ? value : -1.0F);
      const EntryPtr entry = submit_step(worker, step, from, to, data);
      if (!await(worker, entry)) return;
      CHECK_OK(entry->completion->status());
      CHECK_EQ(data, std::vector<float>(count, value));
      ++passed;
    }
  });
  CHECK_EQ(job.stuck(), std::string());
  CHECK_EQ(passed.load(), 2 * kSteps);
}

EntryPtr held_send(int source, int destination) {
  static float value;
  return send_entry("x", source, destination, &value, 1);
}

}  // namespace

TEST(elastic_sends_between_survivors_are_handed_out_by_both_or_redone_by_both) {
  // Each worker dies after each of these numbers, though not in every layout.
  const std::vector<int> kAfter[] = {{0, 7}, {1, 20}};
  for (std::size_t layout = 0; layout < kThreeWorkers.size(); ++layout) {
    for (int victim = 0; victim < 3; ++victim) {
      for (const int after : kAfter[(layout + static_cast<std::size_t>(victim)) % 2]) {
        pass_numbers(kThreeWorkers[layout], victim, after);
      }
    }
  }
}

TEST(elastic_send_to_a_worker_that_died_is_an_error_that_names_it) {
  for (const bool receives : {false, true}) {
    ElasticJob job({0, 0, 1}, {});
    std::atomic<bool> submitted{false};
    job.run([&](ElasticJob::Worker& worker) {
      std::vector<float> data(3);
      if (worker.number == 1) {
        CHECK(soon([&] { return submitted.load(); }));
        worker.engine().abort("this worker dies");
        worker.dead = true;
        return;
      }
      if (worker.number == 2) return;
      const EntryPtr entry = submit_step(worker, 0, receives ? 1 : 0, receives ? 0 : 1, data);
      submitted = true;
      CHECK(await(worker, entry));
      CHECK_STATUS(entry->completion->status(), StatusCode::kRankFailed);
    });
    const std::string text =
        receives ? "send 'step0' from rank 1 to rank 0" : "send 'step0' from rank 0 to rank 1";
    CHECK_EQ(job.stuck(), text + " was in flight, and rank 1 is gone");
  }
}

TEST(commit_book_counts_the_commits_of_each_pair_of_ranks) {
  CommitBook book;
  const Group pair{0, {1, 2}, 0, 0};
  book.hold(held_send(1, 2), pair);
  book.hold(held_send(2, 1), pair);
  const CommitKey key = commit_key(held_send(1, 2)->request);
  CHECK(is_pair(key) && !is_pair(commit_key(*std::make_unique<Request>())));
  CHECK(key != commit_key(held_send(1, 3)->request) && key != commit_key(held_send(0, 2)->request));
  CHECK_EQ(book.due_sets(), std::vector<CommitKey>{key});
  CHECK_EQ(book.group(key).ranks, (std::vector<int>{1, 2}));
  CHECK_EQ(book.complete(key).size(), std::size_t{2});
  CHECK_EQ(book.counts(), (CommitCounts{{key, 1}}));
  // The other rank has completed the next commit, this one not: the commit point hands it out.
  book.hold(held_send(1, 2), pair);
  book.hold(held_send(1, 3), {0, {1, 3}, 0, 0});
  CHECK_EQ(book.complete_up_to({{key, 2}}).size(), std::size_t{1});
  CHECK_EQ(book.rest().size(), std::size_t{1});
  CHECK_EQ(book.counts(), (CommitCounts{{key, 2}}));
}
