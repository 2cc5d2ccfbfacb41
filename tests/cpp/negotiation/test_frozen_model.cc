// FrozenRank schedules against a model: random programs on ranks, with random delays of every
// message, every vote and every collective, with the real coordinator, cycle watch and schedules.
// All ranks run the same rounds in the same order, nobody runs what a rank has not submitted, and
// every program comes to its end, although ranks deviate, rest, and leave.
#include <algorithm>
#include <deque>
#include <map>
#include <random>

#include "check.h"
#include "coordinators.h"
#include "negotiation/cycle_watch.h"
#include "negotiation/frozen_schedule.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

constexpr int kFrozenTicks = 60000;
constexpr int kPatienceTicks = 400;  // without progress: thaw

struct FrozenUp {
  int arrives = 0;
  bool thaw = false;
  std::uint32_t epoch = 0;
  std::string name;
};

struct FrozenDown {
  int arrives = 0;
  bool thaw = false;
  std::uint32_t epoch = 0;
  std::vector<Response> responses;
};

struct FrozenCast {
  std::uint64_t until = 0;
  std::vector<int> seen_at;  // by rank: the tick from which it sees the vote
};

struct FrozenRank {
  std::vector<std::string> program;  // names, in the order in which this rank submits them
  std::size_t next = 0;
  int resting = 0;
  std::map<std::string, bool> pending;  // the name, and whether the coordinator was asked for it
  FrozenSchedule schedule;
  std::uint32_t epoch = 0;
  std::uint32_t thawed_epoch = 0;
  int progress = 0;
  std::deque<std::string> running;  // agreed, one after the other
  std::deque<Freeze> freezes;       // behind all that runs
  int running_for = 0;
  std::deque<FrozenUp> up;
  std::deque<FrozenDown> down;
  std::vector<std::string> ran;
  bool leaving = false;
  bool left = false;
};

class FrozenModel {
 public:
  explicit FrozenModel(unsigned seed)
      : random_(seed),
        size_(2 + pick(3)),
        window_(1 + pick(6)),
        watch_(1 + pick(3)),
        ranks_(size_) {
    make_programs();
    coordinator_ = std::make_unique<Coordinator>(make_coordinator(size_));
  }

  // False: some program did not come to its end.
  bool run() {
    for (now_ = 0; now_ < kFrozenTicks; ++now_) {
      bool ended = true;
      for (int rank = 0; rank < size_; ++rank) {
        advance(rank);
        ended = ended && ranks_[rank].left;
      }
      if (ended) return true;
      if (chance(60)) coordinate();
    }
    return false;
  }

  void check() {
    for (int rank = 1; rank < size_; ++rank) CHECK(ranks_[rank].ran == ranks_[0].ran);
    CHECK_EQ(ranks_[0].ran.size(), total_);
  }

  std::uint64_t frozen_runs() const { return frozen_runs_; }
  std::uint64_t thaws() const { return thaws_; }

 private:
  int pick(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }
  bool chance(int percent) { return pick(100) < percent; }

  // Steps that repeat, with others between; the order within a step may differ by rank where all of
  // the step may be in flight.
  void make_programs() {
    const int tensors = 1 + pick(5);
    const bool shuffles = window_ > 5;
    for (int step = 3 + pick(25); step > 0; --step) {
      std::vector<std::string> names;
      for (int i = 0; i < tensors; ++i) names.push_back("t" + std::to_string(i));
      if (chance(8)) names.push_back("new" + std::to_string(pick(3)));
      if (chance(8)) names.erase(names.begin() + pick(static_cast<int>(names.size())));
      total_ += names.size();
      for (FrozenRank& one : ranks_) {
        if (shuffles && chance(50)) std::shuffle(names.begin(), names.end(), random_);
        one.program.insert(one.program.end(), names.begin(), names.end());
      }
    }
  }

  void send_up(int rank, FrozenUp message) {
    std::deque<FrozenUp>& up = ranks_[rank].up;
    message.arrives = std::max(now_ + pick(6), up.empty() ? 0 : up.back().arrives);
    up.push_back(std::move(message));
  }
  void send_down(int rank, FrozenDown message) {
    std::deque<FrozenDown>& down = ranks_[rank].down;
    message.arrives = std::max(now_ + pick(6), down.empty() ? 0 : down.back().arrives);
    down.push_back(std::move(message));
  }

  void ask(int rank, const std::string& name) {
    ranks_[rank].pending[name] = true;
    send_up(rank, {0, false, ranks_[rank].epoch, name});
  }

  void want_thaw(int rank) {
    FrozenRank& one = ranks_[rank];
    if (one.schedule.thaws()) return;
    one.schedule.thaw();
    send_up(rank, {0, true, one.epoch, ""});
  }

  void admit(int rank, const std::string& name) {
    FrozenRank& one = ranks_[rank];
    one.pending[name] = false;
    const auto id = ids_.find(name);
    if (id == ids_.end() || !one.schedule.admit(id->second)) want_thaw(rank);
  }

  void submit(int rank) {
    FrozenRank& one = ranks_[rank];
    if (one.resting > 0 && --one.resting > 0) return;
    if (one.next == one.program.size() ||
        static_cast<int>(one.pending.size() + one.running.size()) >= window_)
      return;
    const std::string name = one.program[one.next];
    const bool runs = std::count(one.running.begin(), one.running.end(), name) > 0;
    if (one.pending.contains(name) || runs) return;
    ++one.next;
    one.resting = chance(3) ? pick(2 * kPatienceTicks) : pick(4);
    one.progress = now_;
    if (one.schedule.on()) return admit(rank, name);
    ask(rank, name);
  }

  void advance(int rank) {
    FrozenRank& one = ranks_[rank];
    if (one.left) return;
    if (chance(80)) submit(rank);
    execute(one);
    if (!one.running.empty()) return;  // it does nothing else meanwhile
    if (!one.freezes.empty()) return begin(rank);
    hear(rank);
    if (one.running.empty() && one.schedule.on()) take_part(rank);
    leave(rank);
  }

  void execute(FrozenRank& one) {
    while (!one.running.empty() && one.running_for-- <= 0) {
      one.ran.push_back(one.running.front());
      one.running.pop_front();
      one.running_for = pick(4);
    }
  }

  void agree(int rank, const std::string& name) {
    FrozenRank& one = ranks_[rank];
    CHECK_EQ(one.pending.erase(name), std::size_t{1});
    one.running.push_back(name);
    one.progress = now_;
  }

  void hear(int rank) {
    FrozenRank& one = ranks_[rank];
    while (one.freezes.empty() && !one.down.empty() && one.down.front().arrives <= now_) {
      const FrozenDown message = one.down.front();
      one.down.pop_front();
      if (message.thaw) {
        one.thawed_epoch = std::max(one.thawed_epoch, message.epoch);
        if (one.schedule.on() && one.epoch == message.epoch) one.schedule.thaw();
      }
      for (const Response& response : message.responses) {
        if (response.form == Response::Form::kFreeze) {
          one.freezes.push_back(response.freeze);
        } else {
          CHECK(!one.schedule.on());
          agree(rank, response.request.name);
        }
      }
    }
  }

  void begin(int rank) {
    FrozenRank& one = ranks_[rank];
    const Freeze freeze = one.freezes.front();
    one.freezes.pop_front();
    one.schedule.begin(freeze.ids);
    one.epoch = freeze.epoch;
    one.progress = now_;
    if (one.thawed_epoch >= one.epoch) one.schedule.thaw();
    if (one.leaving) want_thaw(rank);
    for (const auto& [name, asked] : std::map(one.pending)) admit(rank, name);
  }

  void take_part(int rank) {
    FrozenRank& one = ranks_[rank];
    if (!one.pending.empty() && now_ - one.progress > kPatienceTicks) want_thaw(rank);
    FrozenSchedule& schedule = one.schedule;
    auto& votes = votes_[schedule.round()];
    if (schedule.can_vote() && chance(70)) {
      FrozenCast& cast = votes[rank];
      cast.until = schedule.vote();
      for (int other = 0; other < size_; ++other) cast.seen_at.push_back(now_ + pick(8));
      cast.seen_at[rank] = now_;
    }
    if (!schedule.voted() || static_cast<int>(votes.size()) < size_) return;
    std::uint64_t lowest = UINT64_MAX;
    for (const auto& [voter, cast] : votes) {
      if (cast.seen_at[rank] > now_) return;
      lowest = std::min(lowest, cast.until);
    }
    const std::vector<std::uint32_t> ids = schedule.ids();
    const std::vector<std::uint32_t> slots = schedule.decide(lowest);
    for (const std::uint32_t slot : slots) agree(rank, names_.at(ids[slot]));
    frozen_runs_ += slots.size();
    if (!slots.empty()) return;
    CHECK(!schedule.on());
    ++thaws_;
    if (rank == 0) watch_.thawed(1000);
    for (const auto& [name, asked] : std::map(one.pending)) ask(rank, name);
  }

  // A rank leaves once no schedule is frozen here.
  void leave(int rank) {
    FrozenRank& one = ranks_[rank];
    if (one.next < one.program.size() || !one.pending.empty() || !one.running.empty()) return;
    if (one.schedule.on() || !one.freezes.empty() || !one.down.empty()) {
      one.leaving = true;
      if (one.schedule.on()) want_thaw(rank);
      return;
    }
    if (std::all_of(ranks_.begin(), ranks_.end(), [](const FrozenRank& other) {
          return other.next == other.program.size() && other.pending.empty() &&
                 !other.schedule.on();
        })) {
      one.left = true;
    }
  }

  void coordinate() {
    for (int rank = 0; rank < size_; ++rank) {
      std::deque<FrozenUp>& up = ranks_[rank].up;
      for (; !up.empty() && up.front().arrives <= now_; up.pop_front()) {
        const FrozenUp& message = up.front();
        if (message.thaw) {
          relay(message.epoch);
        } else if (message.epoch >= coordinator_->epoch()) {
          CHECK_OK(coordinator_->submit(rank, allreduce_of(message.name, 4), kStart));
        }
      }
    }
    std::vector<Response> responses = coordinator_->take_responses();
    if (responses.empty()) return;
    for (Response& response : responses) {
      const bool cached = response.form == Response::Form::kCached;
      ids_[response.request.name] = response.cache_id;
      names_[response.cache_id] = response.request.name;
      cached ? watch_.note(response.cache_id) : watch_.reset();
    }
    if (watch_.ready() && coordinator_->can_freeze()) {
      coordinator_->freeze(watch_.schedule());
      watch_.reset();
      for (Response& one : coordinator_->take_responses()) responses.push_back(std::move(one));
    }
    for (int rank = 0; rank < size_; ++rank) send_down(rank, {0, false, 0, responses});
  }

  void relay(std::uint32_t epoch) {
    if (epoch <= relayed_) return;
    relayed_ = epoch;
    for (int rank = 0; rank < size_; ++rank) send_down(rank, {0, true, epoch, {}});
  }

  std::mt19937 random_;
  const int size_;
  const int window_;  // so many may be in flight
  CycleWatch watch_;
  std::vector<FrozenRank> ranks_;
  std::unique_ptr<Coordinator> coordinator_;
  std::map<std::string, std::uint32_t> ids_;
  std::map<std::uint32_t, std::string> names_;
  std::map<std::uint64_t, std::map<int, FrozenCast>> votes_;  // by round and rank
  std::uint32_t relayed_ = 0;
  std::size_t total_ = 0;  // operations of a rank
  std::uint64_t frozen_runs_ = 0;
  std::uint64_t thaws_ = 0;
  int now_ = 0;
};

}  // namespace

TEST(frozen_model_of_random_programs_runs_alike_everywhere) {
  std::uint64_t frozen_runs = 0;
  std::uint64_t thaws = 0;
  constexpr unsigned kPrograms = testing::cases_of_model(2000);
  for (unsigned seed = 1; seed <= kPrograms; ++seed) {
    FrozenModel model(seed);
    const bool ended = model.run();
    if (!ended) CHECK_EQ(seed, 0U);
    if (!ended) continue;
    model.check();
    frozen_runs += model.frozen_runs();
    thaws += model.thaws();
  }
  CHECK(frozen_runs > 25 * kPrograms);
  CHECK(thaws > kPrograms);
}

TEST(cycle_watch_wants_cycles_alike_and_pays_for_early_thaws) {
  CycleWatch watch(2);
  const auto note = [&](std::vector<std::uint32_t> ids) {
    for (const std::uint32_t id : ids) watch.note(id);
  };
  note({1, 2, 3});
  note({1, 3, 2});
  CHECK(!watch.ready());
  note({3});  // the second cycle is over
  CHECK(watch.ready());
  CHECK(watch.schedule() == std::vector<std::uint32_t>{1, 2, 3});
  note({4});
  CHECK(!watch.ready());  // the cycle under way is another one
  watch.reset();
  note({5, 5, 5});
  CHECK(watch.ready());
  CHECK(watch.schedule() == std::vector<std::uint32_t>{5});
  watch.thawed(1);  // too early to have paid
  note({5, 5, 5});
  CHECK(!watch.ready());
  note({5, 5});
  CHECK(watch.ready());
  watch.thawed(100);
  note({5, 5, 5});
  CHECK(watch.ready());
  CHECK(!CycleWatch(0).ready());
}
