// Entries between two worlds: submitted in the gap, to engines of long ago, and while a worker
// leaves.
#include "elastic_worlds.h"
#include "host/host_backend.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

// One process that goes through several worlds alone, with the pending operations of its peers
// beside it.
struct Chain {
  explicit Chain(std::size_t size) : pending(size) {
    for (auto& one : pending) one = std::make_shared<PendingOperations>();
  }
  // Makes the next world, of the workers `members`, without resuming it.
  void make(const std::vector<int>& members) {
    const int epoch = static_cast<int>(worlds.size());
    worlds.emplace_back(pending.size());
    std::vector<std::unique_ptr<Fabric>> fabrics(1);
    if (members.size() > 1) {
      auto made = make_inproc_world(Hosts(members.size()), config);
      CHECK_OK(made.status());
      fabrics = std::move(made.value());
    }
    for (std::size_t rank = 0; rank < members.size(); ++rank) {
      const Config own = stalls_end_at_rank_0(config, rank);
      std::unique_ptr<Backend> backend = std::make_unique<SelfBackend>();
      if (fabrics[rank]) backend = std::make_unique<HostBackend>(*fabrics[rank], own);
      const auto worker = static_cast<std::size_t>(members[rank]);
      const Engine::Elastic elastic{{epoch, pending[worker]->process_sets(rank_of)},
                                    pending[worker]};
      worlds.back()[worker] = std::make_unique<Engine>(std::move(fabrics[rank]), std::move(backend),
                                                       own, GpuLibraries::search(Config(), {}),
                                                       std::make_unique<Trace>(), elastic);
    }
  }
  void resume() {
    for (std::size_t i = 0; i < pending.size(); ++i) {
      if (worlds.back()[i]) pending[i]->resume(*worlds.back()[i], rank_of);
    }
  }
  void suspend() {
    for (const auto& engine : worlds.back()) {
      if (engine) engine->suspend("the test forms another world");
    }
  }
  Engine& engine(std::size_t world, std::size_t worker) { return *worlds[world][worker]; }
  void leave() {
    std::vector<std::thread> threads;
    for (const auto& engine : worlds.back()) {
      if (engine) threads.emplace_back([&] { engine->shutdown(); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  Config config = quick_config();
  std::vector<std::shared_ptr<PendingOperations>> pending;   // by worker
  std::vector<int> rank_of;                                  // of the next world
  std::vector<std::vector<std::unique_ptr<Engine>>> worlds;  // by epoch and worker
};

bool readable(int fd) {
  std::uint64_t count = 0;
  return ::read(fd, &count, sizeof count) == sizeof count;
}

Status outcome_of(const EntryPtr& entry) {
  if (!entry->completion->wait_until(Deadline::after(std::chrono::minutes(2)))) {
    return Status(StatusCode::kTimeout, "the test's own deadline passed");
  }
  return entry->completion->status();
}

EntryPtr broadcast_entry(const std::string& name, std::vector<float>& values, int root) {
  EntryPtr entry = allreduce_entry(name, values);
  entry->request.kind = Kind::kBroadcast;
  entry->request.root = root;
  return entry;
}

}  // namespace

TEST(elastic_pending_takes_what_is_submitted_between_two_worlds) {
  Chain chain(2);
  chain.make({0, 1});
  chain.resume();
  chain.suspend();
  std::vector<float> a = {1}, b = {2}, again = {3};
  const EntryPtr first = allreduce_entry("x", a);
  CHECK_OK(chain.engine(0, 0).enqueue(first, true));
  CHECK_STATUS(chain.engine(0, 0).enqueue(allreduce_entry("x", again), false),
               StatusCode::kDuplicateName);
  CHECK(!chain.engine(0, 0).wait(*first, true, Deadline::after(std::chrono::milliseconds(20))));
  chain.rank_of = {0, 1};
  chain.make({0, 1});
  chain.resume();
  const EntryPtr second = allreduce_entry("x", b);
  CHECK_OK(chain.engine(0, 1).enqueue(second, false));  // forwarded
  CHECK(chain.engine(0, 0).wait(*first, true, Deadline::after(std::chrono::minutes(2))));
  CHECK_OK(outcome_of(second));
  CHECK_EQ(a[0] + b[0], 6.0F);
  CHECK_EQ(first->completion->epoch, 1);
  chain.leave();
}

TEST(elastic_pending_knows_the_ranks_of_engines_of_long_ago) {
  Chain chain(4);
  chain.make({0, 1, 2, 3});
  chain.resume();
  chain.suspend();
  chain.rank_of = {-1, 0, 1, 2};
  chain.make({1, 2, 3});
  chain.resume();
  chain.suspend();
  // Worker 3 was rank 3, then rank 2, and will be rank 1.
  std::vector<float> a = {0}, b = {5}, lost = {0};
  const EntryPtr suspended = broadcast_entry("x", a, 3);
  CHECK_OK(chain.engine(0, 2).enqueue(suspended, false));
  chain.rank_of = {-1, 0, 1};
  chain.make({2, 3});
  chain.resume();
  const EntryPtr root = broadcast_entry("x", b, 2);
  CHECK_OK(chain.engine(1, 3).enqueue(root, false));
  CHECK_OK(outcome_of(suspended));
  CHECK_OK(outcome_of(root));
  CHECK_EQ(a[0], 5.0F);
  CHECK_EQ(root->request.root, 1);
  CHECK_STATUS(chain.engine(0, 2).enqueue(broadcast_entry("y", lost, 0), false),
               StatusCode::kRankFailed);
  chain.leave();
}

TEST(elastic_lone_world_continues_what_waits_without_a_deadlock) {
  Chain chain(2);
  chain.make({0, 1});
  chain.resume();
  std::vector<float> a = {1}, b = {2}, late = {3};
  const EntryPtr first = allreduce_entry("a", a);
  const EntryPtr second = allreduce_entry("b", b);
  // Submits in turn, to the engine of old, from wherever the first one ends.
  first->completion->then([&] { CHECK_OK(chain.engine(0, 0).enqueue(second, false)); });
  CHECK_OK(chain.engine(0, 0).enqueue(first, false));
  chain.suspend();
  const EntryPtr third = allreduce_entry("late", late);
  std::atomic<bool> continued{false};
  third->completion->then([&] { continued = true; });
  chain.rank_of = {0, -1};
  chain.make({0});
  chain.resume();
  CHECK_OK(outcome_of(first));
  CHECK_OK(outcome_of(second));
  CHECK_EQ(a[0] + b[0], 3.0F);
  // A lone world that has ended keeps the continuation of what comes too late, for the next one.
  chain.suspend();
  CHECK_OK(chain.engine(1, 0).enqueue(third, false));
  CHECK(!continued.load());
  chain.rank_of = {0};
  chain.make({0, 1});
  chain.resume();
  std::vector<float> peer = {4};
  CHECK_OK(run(chain.engine(2, 1), allreduce_entry("late", peer)));
  CHECK_OK(outcome_of(third));
  CHECK(soon([&] { return continued.load(); }));
  CHECK_EQ(late[0], 7.0F);
  chain.leave();
}

TEST(elastic_world_that_ends_before_it_is_resumed_leaves_the_rest_to_the_next) {
  Chain chain(2);
  chain.make({0, 1});
  chain.resume();
  std::vector<float> a = {1};
  const EntryPtr first = allreduce_entry("x", a);
  CHECK_OK(chain.engine(0, 0).enqueue(first, false));
  chain.suspend();
  chain.rank_of = {0, 1};
  chain.make({0, 1});
  chain.engine(1, 1).suspend("gone before anybody has resumed");
  CHECK(ends_soon(chain.engine(1, 0), std::chrono::minutes(2)));
  chain.resume();
  CHECK(soon([&] { return readable(chain.pending[0]->lost_fd()); }));  // resume() has not reset it
  CHECK(!first->completion->done());
  chain.suspend();
  CHECK(!chain.pending[0]->report({1}).cause.ok());
  chain.rank_of = {0, -1};
  chain.make({0});
  chain.resume();
  CHECK_OK(outcome_of(first));
  CHECK_EQ(a[0], 1.0F);
  chain.leave();
}

TEST(elastic_lost_fd_is_for_worlds_that_end_by_themselves) {
  Chain chain(2);
  chain.make({0, 1});
  chain.resume();
  chain.engine(0, 1).suspend("asked to");
  CHECK(!readable(chain.pending[1]->lost_fd()));
  CHECK(soon([&] { return readable(chain.pending[0]->lost_fd()); }));
  chain.rank_of = {0, 1};
  chain.make({0, 1});
  chain.resume();
  chain.engine(1, 0).suspend("asked to");
  CHECK(ends_soon(chain.engine(1, 1), std::chrono::minutes(2)));
  chain.suspend();  // all are suspended
  chain.make({0, 1});
  chain.resume();  // nobody has read the signal of the world before
  CHECK(!readable(chain.pending[1]->lost_fd()));
  chain.leave();
}

TEST(elastic_shutdown_ends_what_is_pending) {
  Chain chain(2);
  chain.make({0, 1});
  chain.resume();
  std::vector<float> a = {1}, b = {2}, c = {3};
  const EntryPtr suspended = allreduce_entry("a", a);
  const EntryPtr late = allreduce_entry("b", b);
  CHECK_OK(chain.engine(0, 0).enqueue(suspended, false));
  chain.suspend();
  CHECK_OK(chain.engine(0, 0).enqueue(late, false));
  std::thread waits([&] {
    CHECK(chain.engine(0, 0).wait(*suspended, true, Deadline::after(std::chrono::minutes(2))));
  });
  chain.engine(0, 0).shutdown();
  waits.join();
  CHECK_STATUS(outcome_of(suspended), StatusCode::kShutdown);
  CHECK_STATUS(outcome_of(late), StatusCode::kShutdown);
  CHECK_STATUS(chain.engine(0, 0).enqueue(allreduce_entry("c", c), false), StatusCode::kShutdown);
}

TEST(elastic_engines_of_old_refuse_once_the_last_one_was_left) {
  Chain chain(1);
  chain.make({0});
  chain.resume();
  chain.suspend();
  chain.rank_of = {0};
  chain.make({0});
  chain.resume();
  chain.leave();
  std::vector<float> a = {1};
  CHECK_STATUS(chain.engine(0, 0).enqueue(allreduce_entry("a", a), false), StatusCode::kShutdown);
}

TEST(elastic_abort_fails_the_own_entries_and_parks_those_of_the_others) {
  Chain chain(2);
  chain.make({0, 1});
  chain.resume();
  std::vector<float> a = {1}, b = {2}, c = {3};
  const EntryPtr own = allreduce_entry("a", a);
  const EntryPtr other = allreduce_entry("b", b);
  CHECK_OK(chain.engine(0, 1).enqueue(own, false));
  CHECK_OK(chain.engine(0, 0).enqueue(other, false));
  chain.engine(0, 1).abort("rank 1 raised ValueError");
  CHECK_STATUS(outcome_of(own), StatusCode::kRankFailed);
  CHECK_STATUS(chain.engine(0, 1).enqueue(allreduce_entry("c", c), false), StatusCode::kRankFailed);
  CHECK(soon([&] { return readable(chain.pending[0]->lost_fd()); }));
  CHECK(!readable(chain.pending[1]->lost_fd()));
  const PendingOperations::Report report = chain.pending[0]->report({1});
  CHECK_EQ(report.cause.failed_rank(), 1);
  CHECK(has(report.cause.message(), "rank 1 raised ValueError"));
  CHECK(!other->completion->done());
  chain.rank_of = {0, -1};
  chain.make({0});
  chain.resume();
  CHECK_OK(outcome_of(other));
  chain.leave();
}

TEST(elastic_failed_pending_refuses_until_the_next_world) {
  Chain chain(1);
  chain.make({0});
  chain.resume();
  chain.suspend();
  std::vector<float> a = {1}, b = {2};
  const EntryPtr waits = allreduce_entry("a", a);
  CHECK_OK(chain.engine(0, 0).enqueue(waits, false));
  chain.pending[0]->fail(Status(StatusCode::kRankFailed, "something cannot be redone"));
  CHECK_STATUS(outcome_of(waits), StatusCode::kRankFailed);
  CHECK_STATUS(chain.engine(0, 0).enqueue(allreduce_entry("a", a), false), StatusCode::kRankFailed);
  chain.rank_of = {0};
  chain.make({0});
  chain.resume();
  CHECK_OK(run(chain.engine(0, 0), allreduce_entry("b", b)));
  chain.leave();
}

TEST(elastic_peer_that_shuts_down_in_a_collective_is_a_lost_one) {
  Chain chain(2);
  chain.config.shutdown_timeout = 0.2;
  chain.make({0, 1});
  chain.resume();
  std::vector<float> a = {1}, b = {2};
  const EntryPtr waits = allreduce_entry("a", a);
  const EntryPtr leaver = allreduce_entry("b", b);
  CHECK_OK(chain.engine(0, 0).enqueue(waits, false));
  CHECK_OK(chain.engine(0, 1).enqueue(leaver, false));
  chain.engine(0, 1).shutdown();
  CHECK_STATUS(outcome_of(leaver), StatusCode::kShutdown);
  CHECK(soon([&] { return readable(chain.pending[0]->lost_fd()); }));
  CHECK(!waits->completion->done());
  CHECK_STATUS(chain.engine(0, 0).status(), StatusCode::kRankFailed);
  chain.rank_of = {0, -1};
  chain.make({0});
  chain.resume();
  CHECK_OK(outcome_of(waits));
  chain.leave();
}

TEST(elastic_stall_suspects_the_rank_that_is_waited_for_and_parks) {
  Chain chain(3);
  chain.config.stall_shutdown = 0.1;
  chain.make({0, 1, 2});
  chain.resume();
  std::vector<float> a = {1}, b = {2};
  const EntryPtr first = allreduce_entry("a", a);
  const EntryPtr second = allreduce_entry("a", b);
  CHECK_OK(chain.engine(0, 0).enqueue(first, false));
  CHECK_OK(chain.engine(0, 2).enqueue(second, false));
  CHECK(soon([&] { return readable(chain.pending[0]->lost_fd()); }));
  CHECK(soon([&] { return readable(chain.pending[2]->lost_fd()); }));
  CHECK_STATUS(chain.pending[0]->report({}).cause, StatusCode::kStalled);
  CHECK_EQ(chain.pending[0]->report({}).cause.failed_rank(), 1);
  CHECK(!first->completion->done());
  CHECK(!second->completion->done());
  chain.suspend();
  chain.rank_of = {0, -1, 1};
  chain.config.stall_shutdown = 0;
  chain.make({0, 2});
  chain.resume();
  CHECK_OK(outcome_of(first));
  CHECK_OK(outcome_of(second));
  CHECK_EQ(a[0], 3.0F);
  chain.leave();
}

TEST(elastic_names_of_transactions_are_checked_at_the_call) {
  Chain chain(1);
  chain.make({0});
  chain.resume();
  std::vector<float> a = {1};
  EntryPtr entry = allreduce_entry("a", a);
  entry->request.transaction = std::string(kMaxNameBytes + 1, 'x');
  CHECK_STATUS(chain.engine(0, 0).enqueue(entry, false), StatusCode::kInvalidArgument);
  CHECK_STATUS(chain.engine(0, 0).enqueue(
                   change_entry(Kind::kBarrier, std::string(kMaxNameBytes + 1, 'x')), false),
               StatusCode::kInvalidArgument);
  chain.leave();
}

TEST(elastic_sends_are_refused_at_the_call) {
  Chain chain(2);
  chain.make({0, 1});
  chain.resume();
  std::vector<float> a = {1};
  const EntryPtr entry = allreduce_entry("a", a);
  entry->request.kind = Kind::kSend;
  entry->request.ranks = {0, 1};
  const Status status = chain.engine(0, 0).enqueue(entry, false);
  CHECK_STATUS(status, StatusCode::kInvalidArgument);
  CHECK(has(status.message(), "an elastic job takes no sends"));
  chain.leave();
}
