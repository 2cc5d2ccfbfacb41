// A rank leaves cleanly while others still want something of it: they get an error, whichever rank
// leaves.
#include <algorithm>
#include <string>
#include <thread>

#include "check.h"
#include "engine_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

constexpr int kRanks = 3;
// Shared memory, channels only, and both.
const std::vector<Hosts> kHostsOfWorlds = {{0, 0, 0}, {0, 1, 2}, {0, 1, 1}};
const std::vector<Kind> kKinds = {Kind::kAllreduce, Kind::kBarrier,       Kind::kBroadcast,
                                  Kind::kJoin,      Kind::kAddProcessSet, Kind::kAllgather};
// The time at which the others submit: so that the leaving rank gets their requests first, or so
// that they have seen it go and are idle.
enum class When { kBefore, kAfter };
const std::vector<When> kTimes = {When::kBefore, When::kAfter};
constexpr auto kSeen = 10ms;
constexpr double kShortStay = 0.3;

struct Operation {
  std::vector<float> values{1, 2};
  EntryPtr entry;
  Status refused;  // at the call
};

std::unique_ptr<Operation> make(Kind kind, std::uint32_t set = 0) {
  auto operation = std::make_unique<Operation>();
  operation->entry = kind == Kind::kAllreduce || kind == Kind::kBroadcast
                         ? allreduce_entry("x", operation->values)
                     : kind == Kind::kAllgather ? rows_entry(kind, "x", operation->values)
                                                : change_entry(kind, "x");
  Request& request = operation->entry->request;
  request.kind = kind;
  request.process_set = set;
  if (kind == Kind::kBroadcast) request.root = 1;
  if (kind == Kind::kJoin) request.name = kJoinName;
  if (kind == Kind::kAddProcessSet) request.ranks = {1, 2};
  return operation;
}

// A world in which one rank leaves. The test's own thread calls the engines of all ranks.
class Leaving {
 public:
  // Rank 0 stays for half of `shutdown_timeout`, in seconds, where there are process sets.
  explicit Leaving(const Hosts& hosts, double shutdown_timeout = kShortStay) {
    Config config = quick_config();
    config.shutdown_timeout = shutdown_timeout;
    engines_ = make_engines(hosts, config);
    for (int rank = 0; rank < kRanks; ++rank) submit(rank, Kind::kAllreduce);
    finish_all();
  }
  ~Leaving() {
    for (const auto& engine : engines_) engine->shutdown();
  }

  std::uint32_t add(const std::vector<int>& ranks) {
    std::vector<EntryPtr> entries;
    for (const auto& engine : engines_) {
      entries.push_back(addition(ranks));
      CHECK_OK(engine->enqueue(entries.back(), false));
    }
    for (int rank = 0; rank < kRanks; ++rank) CHECK_OK(finish(*engines_[rank], entries[rank]));
    return static_cast<std::uint32_t>(entries[0]->completion->set_id);
  }
  void submit(int rank, Kind kind, std::uint32_t set = 0) {
    operations_.emplace_back(rank, make(kind, set));
    Operation& operation = *operations_.back().second;
    // This rank may know it from another rank already.
    operation.refused = engines_[rank]->enqueue(operation.entry, false);
  }
  void leave(int rank) {
    engines_[rank]->shutdown();
    std::this_thread::sleep_for(kSeen);
  }
  void finish_all() {
    for (const auto& [rank, operation] : operations_) {
      CHECK_OK(end_of(rank, *operation));
    }
    operations_.clear();
  }
  void check_clean() {
    for (const auto& engine : engines_) CHECK_STATUS(engine->status(), StatusCode::kShutdown);
  }
  // Checks that everything under way fails because `left` has gone.
  void check_told(int left, const std::vector<std::string>& parts, const std::string& where) {
    for (const auto& [rank, operation] : operations_) {
      const Status status = end_of(rank, *operation);
      CHECK_STATUS(status, StatusCode::kRankFailed);
      CHECK_EQ(status.failed_rank(), left);
      CHECK(status.message().find("rank " + std::to_string(left) + " left after ") == 0);
      for (const std::string& part : parts) {
        if (status.message().find(part) != std::string::npos) continue;
        report_failure(__FILE__, __LINE__,
                       where + ": '" + part + "' is not in: " + status.message());
      }
    }
  }

 private:
  Status end_of(int rank, const Operation& operation) {
    if (!operation.refused.ok()) return operation.refused;
    return finish(*engines_[rank], operation.entry);
  }

  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::pair<int, std::unique_ptr<Operation>>> operations_;  // by rank, under way
};

std::string text_of(const Hosts& hosts, int left, Kind kind, When when) {
  return "hosts " + std::to_string(hosts[1]) + std::to_string(hosts[2]) + ", rank " +
         std::to_string(left) + " leaves " + (when == When::kBefore ? "after " : "before ") +
         std::string(name_of(kind));
}

// Calls `body(hosts, left, when, text)` for every combination.
template <typename Body>
void for_every_leaver(Kind kind, Body&& body) {
  for (const Hosts& hosts : kHostsOfWorlds) {
    for (int left = 0; left < kRanks; ++left) {
      for (const When when : kTimes) body(hosts, left, when, text_of(hosts, left, kind, when));
    }
  }
}

}  // namespace

TEST(leaving_in_any_order_is_not_an_error_where_no_rank_wants_anything) {
  for (const Hosts& hosts : kHostsOfWorlds) {
    std::vector<int> order = {0, 1, 2};
    do {
      Leaving world(hosts);
      for (const int rank : order) world.leave(rank);
      world.check_clean();
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST(leaving_is_an_error_for_ranks_that_want_something_of_the_world) {
  for (const Kind kind : kKinds) {
    for_every_leaver(kind, [&](const Hosts& hosts, int left, When when, const std::string& text) {
      Leaving world(hosts);
      if (when == When::kAfter) world.leave(left);
      for (int rank = 0; rank < kRanks; ++rank) {
        if (rank != left) world.submit(rank, kind);
      }
      if (when == When::kBefore) world.leave(left);
      const std::string what = kind == Kind::kJoin ? "join()" : std::string(name_of(kind)) + " 'x'";
      world.check_told(left,
                       {"left after 1 collectives, but " + what +
                        " waits for it; call collectives on all ranks, none of them under "},
                       text);
    });
  }
}

// The kinds of operations are those of the world.
TEST(leaving_is_an_error_for_the_other_member_of_a_process_set) {
  const Kind kind = Kind::kBroadcast;
  for_every_leaver(kind, [&](const Hosts& hosts, int left, When when, const std::string& text) {
    Leaving world(hosts, kShortStay);
    const int other = left == 1 ? 2 : 1;  // the root of a broadcast is a member
    const std::uint32_t set = world.add({std::min(left, other), std::max(left, other)});
    if (when == When::kAfter) world.leave(left);
    world.submit(other, kind, set);
    if (when == When::kBefore) world.leave(left);
    world.check_told(
        left, {" 'x' waits for it; call collectives on all ranks, none of them under "}, text);
  });
}

TEST(leaving_of_a_rank_outside_ends_a_process_set_only_if_it_is_rank_0_and_says_so) {
  const Kind kind = Kind::kAllreduce;
  for_every_leaver(kind, [&](const Hosts& hosts, int left, When when, const std::string& text) {
    Leaving world(hosts, kShortStay);
    const int first = left == 0 ? 1 : 0;
    const int second = left == 2 ? 1 : 2;
    const std::uint32_t set = world.add({first, second});
    if (when == When::kAfter) world.leave(left);
    world.submit(first, kind, set);
    if (when == When::kBefore) world.leave(left);
    if (left == 0) {
      const std::string members = "process set [1, 2]";
      return world.check_told(0,
                              {" 'x' of " + members +
                               " waits for it: rank 0 decides for all "
                               "process sets"},
                              text);
    }
    world.submit(second, kind, set);
    world.finish_all();
  });
}
