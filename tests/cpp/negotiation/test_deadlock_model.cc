// The proof of deadlocks against a model: random programs on ranks with random delays. An error
// comes only where nobody could ever have gone on, and every program comes to its end.
//
// A rank has one or two threads. Each computes, submits operations and waits for them, with or
// without a limit; the end of an operation may submit another one, as continuations do. Answers and
// requests take their time on the way, and collectives take theirs. Programs begin as ones that fit
// each other; then some calls are swapped or dropped.
#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>

#include "check.h"
#include "coordinators.h"
#include "negotiation/deadlock_watch.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

constexpr double kModelGrace = 1;
constexpr int kHalf = 10;  // ticks of 50 ms
constexpr int kMostTicks = 20000;
constexpr int kDrain = 40;  // ticks that a rank stays for what it has not waited for
constexpr auto kTick = 50ms;

struct Step {
  enum class What { kCompute, kSubmit, kWait, kWaitLimited };
  What what = What::kCompute;
  int ticks = 0;
  int operation = -1;
};

// What every operation is, and the one that its end submits, by rank.
struct Operation {
  Request request;
  std::vector<int> ranks;
  std::map<int, int> then;
};

struct ModelThread {
  std::vector<Step> program;
  std::size_t at = 0;
  int busy = 0;     // ticks that its step still takes
  int waited = -1;  // ticks; -1: it does not wait
  bool ended() const { return at == program.size(); }
};

struct Message {
  int arrives = 0;
  int operation = -1;  // submitted, or answered
  Blocked blocked;     // where there is no operation
};

struct RankState {
  std::vector<ModelThread> threads;
  std::set<int> pending;    // submitted, and no answer has arrived
  std::set<int> done;       // ended, well or with an error
  std::deque<int> running;  // answered, one after the other
  int running_for = 0;
  std::deque<Message> up;
  std::deque<Message> down;
  std::uint64_t submitted = 0;
  Blocked reported;
  int drained = 0;  // ticks after the last thread has ended
  bool left = false;
  bool ended() const {
    return std::all_of(threads.begin(), threads.end(), [](const auto& one) { return one.ended(); });
  }
};

class Model {
 public:
  explicit Model(unsigned seed) : random_(seed), size_(2 + pick(3)), ranks_(size_) {
    make_operations();
    for (int rank = 0; rank < size_; ++rank) make_programs(rank);
    Config config = quiet_config();
    config.deadlock_grace = kModelGrace;
    coordinator_ = std::make_unique<Coordinator>(size_, config);
    if (size_ > 2) coordinator_->add_set({1, {0, 2}, 1, 0});
  }

  // Returns how many operations were failed; -1: some program did not come to its end.
  int run() {
    for (now_ = 0; now_ < kMostTicks; ++now_) {
      bool ended = true;
      for (int rank = 0; rank < size_; ++rank) {
        advance(rank);
        ended = ended && ranks_[rank].left;
      }
      if (ended) return failed_;
      coordinate();
    }
    return -1;
  }

 private:
  int pick(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }
  bool chance(int percent) { return pick(100) < percent; }
  Coordinator::TimePoint time() const { return kStart + now_ * kTick; }

  void make_operations() {
    const int count = 2 + pick(8);
    for (int i = 0; i < count; ++i) {
      Operation one;
      one.request = allreduce_of("op" + std::to_string(i), 4);
      for (int rank = 0; rank < size_; ++rank) one.ranks.push_back(rank);
      if (chance(30)) {
        const int source = pick(size_);
        one.request.kind = Kind::kSend;
        one.ranks = {source, (source + 1 + pick(size_ - 1)) % size_};
        one.request.ranks = {one.ranks[0], one.ranks[1]};
      } else if (size_ > 2 && chance(30)) {
        one.request.process_set = 1;
        one.ranks = {0, 2};
      }
      operations_.push_back(one);
    }
  }

  void make_programs(int rank) {
    std::vector<int> own;
    for (int i = 0; i < static_cast<int>(operations_.size()); ++i) {
      const std::vector<int>& ranks = operations_[i].ranks;
      if (std::count(ranks.begin(), ranks.end(), rank) > 0) own.push_back(i);
    }
    if (own.size() > 1 && chance(20)) {
      const std::size_t i = static_cast<std::size_t>(pick(static_cast<int>(own.size()) - 1));
      std::swap(own[i], own[i + 1]);
    }
    if (!own.empty() && chance(8)) own.erase(own.begin() + pick(static_cast<int>(own.size())));
    std::vector<ModelThread>& threads = ranks_[rank].threads;
    threads.resize(chance(35) ? 2 : 1);
    std::vector<std::vector<int>> open(threads.size());
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (i > 0 && chance(10)) {  // a continuation submits it
        auto& then = operations_[own[i - 1]].then;
        if (then.try_emplace(rank, own[i]).second) continue;
      }
      const auto index = static_cast<std::size_t>(pick(static_cast<int>(threads.size())));
      std::vector<Step>& program = threads[index].program;
      if (chance(40)) program.push_back({Step::What::kCompute, 1 + pick(chance(30) ? 80 : 10), -1});
      program.push_back({Step::What::kSubmit, 0, own[i]});
      if (chance(70)) {
        program.push_back({Step::What::kWait, 0, own[i]});
      } else if (chance(30)) {
        program.push_back({Step::What::kWaitLimited, 1 + pick(60), own[i]});
      } else {
        open[index].push_back(own[i]);
      }
    }
    for (std::size_t i = 0; i < threads.size(); ++i) {
      for (const int operation : open[i]) {
        threads[i].program.push_back({Step::What::kWait, 0, operation});
      }
    }
  }

  void send_up(int rank, Message message) {
    std::deque<Message>& up = ranks_[rank].up;
    message.arrives = std::max(now_ + pick(5), up.empty() ? 0 : up.back().arrives);
    up.push_back(std::move(message));
  }

  void submit(int rank, int operation) {
    ranks_[rank].pending.insert(operation);
    ++ranks_[rank].submitted;
    send_up(rank, {0, operation, {}});
  }

  void advance(int rank) {
    RankState& one = ranks_[rank];
    if (one.left) return;
    while (!one.down.empty() && one.down.front().arrives <= now_) {
      const int operation = one.down.front().operation;
      one.down.pop_front();
      if (one.pending.erase(operation) == 0) continue;  // an error of what it has not submitted
      if (one.running.empty()) one.running_for = pick(chance(10) ? 40 : 3);
      one.running.push_back(operation);
    }
    while (!one.running.empty() && one.running_for-- <= 0) {
      const int operation = one.running.front();
      one.running.pop_front();
      one.running_for = pick(chance(10) ? 40 : 3);
      one.done.insert(operation);
      const auto& then = operations_[operation].then;
      if (then.contains(rank)) submit(rank, then.at(rank));
    }
    for (ModelThread& thread : one.threads) advance(rank, thread);
    if (now_ % 2 == 0) report(rank);
    if (!one.ended()) return;
    const bool idle = one.pending.empty() && one.running.empty();
    if (idle || ++one.drained > kDrain) {
      one.left = true;
      send_up(rank, {0, kGoodbye, {}});
    }
  }

  void advance(int rank, ModelThread& thread) {
    RankState& one = ranks_[rank];
    while (!thread.ended()) {
      const Step& step = thread.program[thread.at];
      if (step.what == Step::What::kCompute && ++thread.busy < step.ticks) return;
      if (step.what == Step::What::kSubmit) submit(rank, step.operation);
      const bool limited = step.what == Step::What::kWaitLimited;
      if ((limited || step.what == Step::What::kWait) && !one.done.contains(step.operation)) {
        ++thread.waited;
        if (!limited || thread.waited < step.ticks) return;
      }
      thread.busy = 0;
      thread.waited = -1;
      ++thread.at;
    }
  }

  // As the engine and the bindings do it.
  void report(int rank) {
    RankState& one = ranks_[rank];
    if (!one.running.empty()) return;  // the runner is busy
    Blocked report;
    bool blocked = !one.ended();
    for (const ModelThread& thread : one.threads) {
      if (thread.ended()) continue;
      const Step& step = thread.program[thread.at];
      blocked = blocked && step.what == Step::What::kWait && thread.waited >= kHalf &&
                one.pending.contains(step.operation);
      if (blocked) report.keys.push_back(operations_[step.operation].request.key());
    }
    for (const int operation : one.pending) {
      const Operation& pending = operations_[operation];
      if (pending.then.contains(rank)) report.keys.push_back(pending.request.key());
    }
    if (!blocked) report = {};
    if (blocked) report.submitted = one.submitted;
    if (blocked) report.pending = static_cast<std::uint32_t>(one.pending.size());
    if (report == one.reported) return;
    one.reported = report;
    send_up(rank, {0, -1, report});
  }

  void coordinate() {
    for (int rank = 0; rank < size_; ++rank) {
      std::deque<Message>& up = ranks_[rank].up;
      for (; !up.empty() && up.front().arrives <= now_; up.pop_front()) {
        const Message& message = up.front();
        if (message.operation == kGoodbye) {
          coordinator_->leave(rank, 0);
        } else if (message.operation < 0) {
          CHECK(coordinator_->reported(rank, encode(message.blocked), time()));
        } else {
          CHECK_OK(coordinator_->submit(rank, operations_[message.operation].request, time()));
        }
      }
    }
    answer(/*deadlock=*/false);
    coordinator_->tick(time());
    answer(/*deadlock=*/true);
  }

  void answer(bool deadlock) {
    std::vector<std::pair<int, std::vector<int>>> answered;
    for (const Response& response : coordinator_->take_responses()) {
      int operation = 0;
      while (operations_[operation].request.key() != response.request.key()) ++operation;
      const std::vector<int>& only = response.recipients;
      answered.emplace_back(operation, only.empty() ? operations_[operation].ranks : only);
      if (!deadlock) continue;
      ++failed_;
      CHECK_STATUS(response.error, StatusCode::kDeadlock);
      CHECK(!can_end_well(operation));
    }
    for (const auto& [operation, recipients] : answered) {
      for (const int rank : recipients) {
        std::deque<Message>& down = ranks_[rank].down;
        down.push_back(
            {std::max(now_ + pick(5), down.empty() ? 0 : down.back().arrives), operation, {}});
      }
    }
  }

  // Whether the operation could still end well if everybody went on as far as they can: the
  // programs, without any time.
  bool can_end_well(int wanted) {
    std::vector<RankState> ranks = ranks_;
    std::map<int, std::set<int>> submitted;  // by operation, and answered to nobody
    for (int rank = 0; rank < size_; ++rank) {
      for (const int operation : ranks[rank].pending) submitted[operation].insert(rank);
      for (const Message& message : ranks[rank].down) {
        if (ranks[rank].pending.contains(message.operation)) {
          submitted[message.operation].erase(rank);
          end(ranks, submitted, rank, message.operation);
        }
      }
      for (const int operation : std::exchange(ranks[rank].running, {})) {
        end(ranks, submitted, rank, operation);
      }
    }
    for (bool moves = true; moves;) {
      moves = false;
      for (int rank = 0; rank < size_; ++rank) {
        for (ModelThread& thread : ranks[rank].threads) {
          moves = go_on(ranks, submitted, rank, thread) || moves;
        }
      }
      for (int i = 0; i < static_cast<int>(operations_.size()); ++i) {
        if (submitted[i].size() < operations_[i].ranks.size()) continue;
        if (i == wanted) return true;
        for (const int rank : std::exchange(submitted[i], {})) end(ranks, submitted, rank, i);
        moves = true;
      }
    }
    return false;
  }

  void end(std::vector<RankState>& ranks, std::map<int, std::set<int>>& submitted, int rank,
           int operation) {
    ranks[rank].done.insert(operation);
    ranks[rank].pending.erase(operation);
    const auto& then = operations_[operation].then;
    if (!then.contains(rank)) return;
    submitted[then.at(rank)].insert(rank);
    ranks[rank].pending.insert(then.at(rank));
  }

  bool go_on(std::vector<RankState>& ranks, std::map<int, std::set<int>>& submitted, int rank,
             ModelThread& thread) {
    if (thread.ended()) return false;
    const Step& step = thread.program[thread.at];
    if (step.what == Step::What::kWait && !ranks[rank].done.contains(step.operation)) return false;
    if (step.what == Step::What::kSubmit) {
      submitted[step.operation].insert(rank);
      ranks[rank].pending.insert(step.operation);
    }
    ++thread.at;
    return true;
  }

  static constexpr int kGoodbye = -2;

  std::mt19937 random_;
  const int size_;
  std::vector<RankState> ranks_;
  std::vector<Operation> operations_;
  std::unique_ptr<Coordinator> coordinator_;
  int now_ = 0;
  int failed_ = 0;
};

}  // namespace

TEST(deadlock_errors_come_where_nobody_can_go_on_and_nowhere_else) {
  int with = 0;
  int without = 0;
  constexpr unsigned kPrograms = hvdlite::testing::cases_of_model(4000);
  for (unsigned seed = 1; seed <= kPrograms; ++seed) {
    const int failed = Model(seed).run();
    if (failed < 0)
      hvdlite::testing::report_failure(__FILE__, __LINE__, "hangs: seed " + std::to_string(seed));
    ++(failed > 0 ? with : without);
  }
  CHECK(with > static_cast<int>(kPrograms / 10));
  CHECK(without > static_cast<int>(kPrograms / 10));
}
