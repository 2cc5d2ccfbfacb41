// Random operations, victims and points of death, checked against a replay by one process.
#include <cmath>
#include <random>

#include "elastic_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

enum class Deed { kStep, kSum, kMean, kWeighted, kGather, kBroadcast, kBarrier };
constexpr int kDeeds = 7;

// What each worker gives to operation `index`; whole numbers, so that sums are exact.
float given(int worker, int index) { return static_cast<float>((worker + 1) * 64 + index % 50); }

// What the workers of an epoch get from it.
std::vector<float> replayed(Deed operation, int index, const std::vector<int>& members, int root) {
  float sum = 0;
  float weights = 0;
  float weighted = 0;
  std::vector<float> gathered;
  for (const int worker : members) {
    const float own = given(worker, index);
    sum += own;
    weights += static_cast<float>(worker + 1);
    weighted += static_cast<float>(worker + 1) * own;
    gathered.insert(gathered.end(), static_cast<std::size_t>(worker + 1), own);
  }
  switch (operation) {
    case Deed::kStep:
      return {sum, sum + static_cast<float>(members.size()), 0};
    case Deed::kSum:
      return {sum};
    case Deed::kMean:
      return {sum / static_cast<float>(members.size())};
    case Deed::kWeighted:
      return {weighted / weights};
    case Deed::kGather:
      return gathered;
    case Deed::kBroadcast:
      return {given(root, index)};
    case Deed::kBarrier:
      return {};
  }
  return {};
}

struct Received {
  int epoch = -1;
  std::vector<float> values;
};

EntryPtr make_deed(Deed operation, const std::string& name, int worker, std::vector<float>& values,
                   int root_rank) {
  EntryPtr entry = allreduce_entry(name, values);
  switch (operation) {
    case Deed::kMean:
      entry->request.op = ReduceOp::kAverage;
      break;
    case Deed::kWeighted:
      entry->request.op = ReduceOp::kAverage;
      entry->request.weighted = true;
      entry->weight = worker + 1;
      break;
    case Deed::kGather:
      return rows_entry(Kind::kAllgather, name, values);
    case Deed::kBroadcast:
      entry->request.kind = Kind::kBroadcast;
      entry->request.root = root_rank;
      break;
    case Deed::kBarrier:
      return change_entry(Kind::kBarrier, name);
    default:
      break;
  }
  return entry;
}

// One operation of one worker. False: it has died.
bool perform(ElasticJob::Worker& worker, Deed operation, const std::string& name, int index,
             int root, std::size_t back, Received& outcome) {
  const float own = given(worker.number, index);
  std::vector<std::vector<float>> tensors = {{own}};
  if (operation == Deed::kStep) tensors = {{own}, {own + 1}, {0}};
  if (operation == Deed::kGather) {
    tensors[0].assign(static_cast<std::size_t>(worker.number + 1), own);
  }
  std::vector<EntryPtr> entries(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto make = [&](const std::vector<int>& members) {
      const auto at = std::find(members.begin(), members.end(), root);
      EntryPtr entry = make_deed(operation, name + std::to_string(i), worker.number, tensors[i],
                                 static_cast<int>(at - members.begin()));
      if (operation == Deed::kStep) entry->request.transaction = name;
      return entry;
    };
    const Status status = worker.submit(make, entries[i], back);
    if (worker.dead) return false;
    CHECK_OK(status);
  }
  if (operation == Deed::kStep) {
    entries.push_back(commit_entry(name));
    CHECK_OK(worker.engine().enqueue(entries.back(), false));
  }
  for (const EntryPtr& entry : entries) {
    if (!await(worker, entry)) return false;
    CHECK_OK(entry->completion->status());
    CHECK_EQ(entry->completion->epoch, entries[0]->completion->epoch);
  }
  outcome.epoch = entries[0]->completion->epoch;
  if (operation == Deed::kGather) {
    outcome.values = output_of(entries[0]);
  } else if (operation != Deed::kBarrier) {
    for (const auto& tensor : tensors) outcome.values.push_back(tensor[0]);
  }
  return true;
}

using DeedLog = std::vector<Received>;

// Averages of three are not exact.
bool nearly(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::abs(x - y) <= 1e-5F * (std::abs(x) + std::abs(y));
  });
}

// Runs `operations` on each of `threads` threads per worker, and checks what they got.
void check_history(const Hosts& hosts, const std::vector<Fault>& faults, int root,
                   const std::vector<Deed>& operations, int threads) {
  ElasticJob job(hosts, faults);
  std::map<int, std::vector<DeedLog>> logs;
  for (const auto& worker : job.workers()) {
    logs[worker->number].resize(static_cast<std::size_t>(threads));
  }
  job.run([&](ElasticJob::Worker& worker) {
    std::vector<std::thread> callers;
    for (int thread = 0; thread < threads; ++thread) {
      callers.emplace_back([&, thread] {
        DeedLog& log = logs.at(worker.number)[static_cast<std::size_t>(thread)];
        for (std::size_t i = 0; i < operations.size(); ++i) {
          Received outcome;
          const std::string name = std::to_string(thread) + "." + std::to_string(i % 3) + ".";
          if (!perform(worker, operations[i], name, static_cast<int>(i), root, i % 3, outcome)) {
            return;
          }
          log.push_back(std::move(outcome));
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  });
  CHECK_EQ(job.stuck(), std::string());
  for (const int worker : job.history().back()) {
    for (std::size_t thread = 0; thread < logs.at(worker).size(); ++thread) {
      const DeedLog& log = logs.at(worker)[thread];
      CHECK_EQ(log.size(), operations.size());
      for (std::size_t i = 0; i < log.size(); ++i) {
        const std::vector<int>& members = job.history()[static_cast<std::size_t>(log[i].epoch)];
        CHECK(nearly(log[i].values, replayed(operations[i], static_cast<int>(i), members, root)));
        const DeedLog& first = logs.at(job.history().back()[0])[thread];
        CHECK_EQ(log[i].epoch, first[i].epoch);
        CHECK_EQ(log[i].values, first[i].values);
      }
    }
  }
}

// Workers 1 and up die in some order; worker 0 or another one never does.
void check_random_history(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](std::size_t limit) {
    return static_cast<int>(random() % static_cast<unsigned>(limit));
  };
  const std::size_t size = 2 + static_cast<std::size_t>(below(3));
  Hosts hosts;
  for (std::size_t i = 0; i < size; ++i) hosts.push_back(i == 0 ? 0 : below(2));
  std::vector<int> alive(size);
  for (std::size_t i = 0; i < size; ++i) alive[i] = static_cast<int>(i);
  std::shuffle(alive.begin(), alive.end(), random);
  const int threads = 1 + below(2);
  std::vector<Fault> faults;
  const int deaths = 1 + below(size - 1);
  for (int epoch = 0; epoch < deaths; ++epoch) {
    Fault fault;
    fault.victim = alive.back();
    alive.pop_back();
    // Two threads may have their operations in any rounds, so no commit is scripted for all ranks.
    fault.point = static_cast<Point>(below(threads == 1 ? 5 : 3));
    fault.at = below(4);
    fault.survivor = alive[static_cast<std::size_t>(below(alive.size()))];
    fault.epoch = epoch;
    faults.push_back(fault);
  }
  std::vector<Deed> operations;
  for (int i = 0; i < 12; ++i) operations.push_back(static_cast<Deed>(below(kDeeds)));
  check_history(hosts, faults, alive[0], operations, threads);
}

}  // namespace

TEST(elastic_random_histories_are_what_one_process_replays) {
  for (unsigned seed = 0; seed < 200; ++seed) check_random_history(seed);
}

TEST(elastic_operations_of_every_kind_survive_a_death_at_every_point) {
  for (int kind = 0; kind < kDeeds; ++kind) {
    const std::vector<Deed> operations(5, static_cast<Deed>(kind));
    for (int point = 0; point < 5; ++point) {
      for (const int victim : {0, 2}) {
        const Fault fault{victim, static_cast<Point>(point), 2, victim == 0 ? 1 : 0, 0};
        check_history({0, 1, 0}, {fault}, 1, operations, 1);
      }
    }
  }
}
