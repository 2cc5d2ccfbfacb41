// A model of late gradients: the real coordinator, and the real part of each
// rank in them, under random schedules. Threads, channels and the data plane are played by the
// test.
//
// Each gradient is an element of its own: so the sum of a collective says which gradients it has.
#include <cmath>
#include <cstdlib>
#include <deque>
#include <random>

#include "check.h"
#include "coordinators.h"
#include "engine/late_results.h"
#include "engine/tensor_queue.h"
#include "engine/timeline.h"
#include "negotiation/late_gradients.h"
#include "trace/trace.h"

namespace hvdlite::testing::late_gradients_model {

// For each number of ranks; HVDLITE_TEST_SCHEDULES asks for more.
int schedules() {
  const char* text = std::getenv("HVDLITE_TEST_SCHEDULES");
  return text == nullptr ? 500 : std::atoi(text);
}

struct Case {
  int ranks = 2;
  int buckets = 1;
  int steps = 5;
  int joins_after = 5;  // the steps of the last rank, which then joins
  LateTerms call;
};

// One collective, in the order that the coordinator gave them.
struct Collective {
  int left = 0;  // ranks that have not entered it
  std::vector<double> sum;
  std::vector<Entry*> entries;
};

struct Rank {
  Rank(int rank, int size) : late(rank, size, queue) {}

  Trace trace;
  Timeline timeline{trace};
  TensorQueue queue{timeline};
  LateResults late;
  ResponseCache cache{Config()};
  std::unordered_map<std::string, EntryPtr> pending;
  // The training thread: the buckets of its step that it has not submitted, then what it waits for.
  int step = -1;
  bool skips = false;
  std::vector<int> left;
  std::vector<EntryPtr> handles;
  std::vector<std::vector<double>> values;  // by bucket
  bool joined = false;                      // has asked for it
  bool done = false;
  // The runner and its channels.
  std::deque<EntryPtr> submitted;
  std::deque<Request> to_coordinator;
  std::deque<Response> from_coordinator;
  std::size_t collectives = 0;
  EntryPtr running;  // its part in a collective that it is in
};

class Model {
 public:
  Model(const Case& chosen, unsigned seed) : case_(chosen), random_(seed) {
    for (int rank = 0; rank < case_.ranks; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(rank, case_.ranks));
      speed_.push_back(1 + static_cast<int>(random_() % 8));
    }
  }

  void run() {
    int idle = 0;
    while (!all_done() && idle < 4000) {
      const int rank = static_cast<int>(random_() % ranks_.size());
      const bool moved = move(rank);
      idle = moved ? 0 : idle + 1;
      if (random_() % 16 == 0) pass_time();
    }
    CHECK(all_done());  // otherwise: a deadlock
    if (all_done()) check_sums();
  }

 private:
  bool all_done() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->done; });
  }
  void pass_time() {
    now_ += std::chrono::microseconds(random_() % 400);
    coordinator_.late_gradients().tick(now_);
    distribute();
  }

  bool move(int rank) {
    switch (random_() % 4) {
      case 0:
        return train(rank);
      case 1:
        return take(rank);
      case 2:
        return hear(rank);
      default:
        return accept(rank);
    }
  }

  int steps_of(int rank) const { return rank + 1 == case_.ranks ? case_.joins_after : case_.steps; }

  // The training thread of a rank; slow ones do not always come to it.
  bool train(int rank) {
    Rank& one = *ranks_[rank];
    if (one.done) return false;
    if (!one.left.empty()) {
      if (!one.skips && static_cast<int>(random_() % 8) >= speed_[rank]) return true;
      submit(rank);
      return true;
    }
    for (const EntryPtr& entry : one.handles) {
      if (!entry->completion->done()) return false;
      CHECK_OK(entry->completion->status());
    }
    end_step(rank);
    return true;
  }

  void end_step(int rank) {
    Rank& one = *ranks_[rank];
    if (one.joined) {
      one.done = true;
      return;
    }
    for (const EntryPtr& entry : one.handles) check_result(rank, *entry);
    one.handles.clear();
    CHECK(one.late.attendance().waiting(case_.call.key) <= static_cast<int>(case_.call.bound));
    if (++one.step == steps_of(rank)) return join(rank);
    one.skips = one.late.attendance().waiting(case_.call.key) > 0;
    for (int bucket = 0; bucket < case_.buckets; ++bucket) one.left.push_back(bucket);
    std::shuffle(one.left.begin(), one.left.end(), random_);
    one.values.assign(static_cast<std::size_t>(case_.buckets), std::vector<double>(elements()));
  }

  std::size_t elements() const { return static_cast<std::size_t>(case_.ranks * case_.steps); }
  std::size_t gradient(int rank, int step) const {
    return static_cast<std::size_t>(rank * case_.steps + step);
  }

  void submit(int rank) {
    Rank& one = *ranks_[rank];
    const int bucket = one.left.back();
    one.left.pop_back();
    std::vector<double>& values = one.values[static_cast<std::size_t>(bucket)];
    values[gradient(rank, one.step)] = 1;
    auto entry = std::make_shared<Entry>();
    entry->request = allreduce_of(std::to_string(bucket), static_cast<std::int64_t>(elements()));
    entry->request.tensors[0].dtype = entry->request.tensors[0].wire = DataType::kFloat64;
    entry->request.op = ReduceOp::kAverage;
    entry->request.weighted = true;
    entry->request.late = case_.call;
    entry->request.late->step = static_cast<std::uint64_t>(one.step);
    entry->key = entry->request.key();
    entry->inputs = {values.data()};
    entry->outputs = {values.data()};
    entry->skips = one.skips;
    if (one.skips) entry->weight = 0;
    CHECK_OK(one.queue.push(entry));
    one.submitted.push_back(entry);
    one.handles.push_back(entry);
    if (!one.skips) given_.push_back({bucket, rank, one.step});
  }

  void join(int rank) {
    Rank& one = *ranks_[rank];
    one.joined = true;
    auto entry = std::make_shared<Entry>();
    entry->request.kind = Kind::kJoin;
    entry->request.name = kJoinName;
    entry->key = entry->request.key();
    one.submitted.push_back(entry);
    one.handles.push_back(entry);
  }

  // The runner takes what was submitted, unless it is in a collective.
  bool take(int rank) {
    Rank& one = *ranks_[rank];
    if (one.running != nullptr || one.submitted.empty()) return false;
    const EntryPtr entry = one.submitted.front();
    one.submitted.pop_front();
    (void)one.queue.take();
    one.to_coordinator.push_back(entry->request);
    if (!entry->request.late || !one.late.take(entry)) one.pending[entry->key] = entry;
    return true;
  }

  // The coordinator hears one rank.
  bool hear(int rank) {
    Rank& one = *ranks_[rank];
    if (one.to_coordinator.empty()) return false;
    CHECK_OK(coordinator_.submit(rank, one.to_coordinator.front(), now_));
    one.to_coordinator.pop_front();
    if (random_() % 2 == 0) distribute();
    return true;
  }

  void distribute() {
    for (const Response& response : coordinator_.take_responses()) {
      CHECK(response.form != Response::Form::kError);
      check_late(response);
      collectives_.emplace_back().left =
          static_cast<int>(ranks_.size()) - static_cast<int>(response.absent.size());
      for (const auto& rank : ranks_) rank->from_coordinator.push_back(response);
    }
  }

  // All collectives of a step have the same participants.
  void check_late(const Response& response) {
    if (response.request.kind == Kind::kJoin) return;
    auto& late = late_[response.request.name];
    late.push_back(response.left_out);
    for (const auto& [name, others] : late_) {
      if (others.size() < late.size() || case_.joins_after < case_.steps) continue;
      CHECK(others[late.size() - 1] == response.left_out);
    }
  }

  // The runner goes on: it leaves a collective that all have entered, or enters the next one.
  bool accept(int rank) {
    Rank& one = *ranks_[rank];
    if (one.running != nullptr) {
      Collective& collective = collectives_[one.collectives - 1];
      if (collective.left > 0) return false;
      std::memcpy(one.running->outputs[0], collective.sum.data(), 8 * elements());
      one.queue.finish(std::exchange(one.running, nullptr), Status());
      return true;
    }
    if (one.from_coordinator.empty()) return false;
    const Response response = one.from_coordinator.front();
    one.from_coordinator.pop_front();
    ++one.collectives;
    const Request* request = response.form == Response::Form::kCached
                                 ? one.cache.at(response.cache_id)
                                 : &response.request;
    CHECK(request != nullptr);
    if (response.form == Response::Form::kFull) {
      one.cache.remember(response.cache_id, request->key(), response.request);
    }
    enter(rank, response, *request);
    return true;
  }

  void enter(int rank, const Response& response, const Request& request) {
    Rank& one = *ranks_[rank];
    EntryPtr entry;
    if (const auto found = one.pending.find(request.key()); found != one.pending.end()) {
      entry = std::move(found->second);
      one.pending.erase(found);
    }
    const auto among = [&](const std::vector<int>& some) {
      return std::binary_search(some.begin(), some.end(), rank);
    };
    if (among(response.absent)) {
      CHECK(entry == nullptr);
      return;
    }
    if (request.kind == Kind::kJoin) {
      one.late.all_joined();
      return one.queue.finish(entry, Status());
    }
    if (among(response.left_out)) {
      auto proxy = one.late.answered_without(request, response.left_out, std::move(entry));
      CHECK_OK(proxy.status());
      entry = std::move(proxy.value());
    } else {
      CHECK(entry != nullptr);
      one.late.answered(*entry, response.left_out);
    }
    Collective& collective = collectives_[one.collectives - 1];
    collective.sum.resize(elements());
    const auto* values = static_cast<const double*>(entry->inputs[0]);
    for (std::size_t i = 0; i < elements() && entry->weight > 0; ++i) {
      collective.sum[i] += entry->weight * values[i];
    }
    one.running = std::move(entry);
    if (--collective.left == 0) results_[request.name].push_back(collective.sum);
  }

  // The rank has the result of its step, like all others.
  void check_result(int rank, Entry& entry) {
    const Rank& one = *ranks_[rank];
    const auto& results = results_[entry.request.name];
    CHECK(static_cast<int>(results.size()) > one.step);
    if (static_cast<int>(results.size()) <= one.step) return;
    const std::vector<double>& result = results[static_cast<std::size_t>(one.step)];
    CHECK(std::memcmp(entry.outputs[0], result.data(), 8 * elements()) == 0);
    const bool counted = result[gradient(rank, one.step)] > 0.5;
    CHECK_EQ(counted, !entry.late && !entry.skips);
  }

  // Each gradient is in one sum at most, and in one sum unless it was late in the end, its rank has
  // joined, or late ones are dropped.
  void check_sums() {
    std::map<std::tuple<int, int, int>, double> counts;
    for (const auto& [name, results] : results_) {
      for (const auto& sum : results) {
        for (int rank = 0; rank < case_.ranks; ++rank) {
          for (int step = 0; step < case_.steps; ++step) {
            const double count = sum[gradient(rank, step)];
            if (std::abs(count) > 1e-9) counts[{std::stoi(name), rank, step}] += count;
          }
        }
      }
    }
    for (const auto& [which, count] : counts) CHECK(std::abs(count - 1) < 1e-9);
    for (const auto& which : given_) {
      const auto [bucket, rank, step] = which;
      const auto& late = late_[std::to_string(bucket)];
      // It stands from its own answer or a later one on; any collective behind that has it.
      const bool last = step + static_cast<int>(case_.call.bound) + 1 >= steps_of(rank);
      const bool was_late = std::binary_search(late[static_cast<std::size_t>(step)].begin(),
                                               late[static_cast<std::size_t>(step)].end(), rank);
      if (was_late && last) continue;
      CHECK_EQ(counts.contains(which), case_.call.fold || !was_late);
    }
  }

  const Case case_;
  std::mt19937 random_;
  Coordinator coordinator_{case_.ranks, quiet_config()};
  Coordinator::TimePoint now_ = kStart;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<int> speed_;  // of 8
  std::deque<Collective> collectives_;
  std::map<std::string, std::vector<std::vector<double>>> results_;  // by name and step
  std::map<std::string, std::vector<std::vector<int>>> late_;        // likewise
  std::vector<std::tuple<int, int, int>> given_;                     // bucket, rank, step
};

Case random_case(int ranks, std::mt19937& random) {
  Case chosen;
  const auto below = [&](unsigned end) { return static_cast<int>(random() % end); };
  chosen.ranks = ranks;
  chosen.buckets = 1 + below(4);
  chosen.steps = 3 + below(6);
  chosen.joins_after =
      below(5) == 0 ? 1 + below(static_cast<unsigned>(chosen.steps)) : chosen.steps;
  chosen.call.key = "roll";
  chosen.call.quorum = static_cast<std::uint32_t>(1 + below(static_cast<unsigned>(chosen.ranks)));
  chosen.call.grace_us = below(2) * below(500);
  chosen.call.bound = static_cast<std::uint32_t>(1 + below(3));
  chosen.call.fold = below(4) != 0;
  return chosen;
}

void run_schedules(int ranks) {
  std::mt19937 random(static_cast<unsigned>(ranks));
  for (int i = 0; i < schedules(); ++i) {
    const Case chosen = random_case(ranks, random);
    Model(chosen, random()).run();
  }
}

// All ranks get the same results in the same order, without a deadlock, and each gradient counts
// once.
TEST(late_gradients_model_of_two_ranks) { run_schedules(2); }
TEST(late_gradients_model_of_three_ranks) { run_schedules(3); }
TEST(late_gradients_model_of_four_ranks) { run_schedules(4); }
TEST(late_gradients_model_of_five_ranks) { run_schedules(5); }

}  // namespace hvdlite::testing::late_gradients_model
