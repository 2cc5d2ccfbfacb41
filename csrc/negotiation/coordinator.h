// Decides when a collective may start: a pure state machine, one per world, on rank 0.
//
// Words: each process set has a *table of pending tensors*. A *pending tensor* says which members
// of the set have submitted a name (of a send: which of its two ranks; the other members know
// nothing of it). When the last one has, the coordinator appends one *response* to the list that
// all members get, in one order for all sets: so two ranks can never wait for each other in
// collectives of two different sets. Ranks that submit different things all get the same error
// instead. The coordinator does not wait for a rank that has joined: responses name it absent,
// until all ranks have joined. Late gradients do not wait for all members (late_gradients.h).
//
// Rank 0's negotiator owns it, and only the runner calls it. It does no I/O and has no clock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/config.h"
#include "negotiation/deadlock_watch.h"
#include "negotiation/late_gradients.h"
#include "negotiation/pending_table.h"
#include "negotiation/stall_monitor.h"
#include "negotiation/step_clock.h"
#include "trace/trace.h"
#include "transport/topology.h"
#include "wire/message.h"

namespace hvdlite {

// What all members of a process set remember of a negotiated request, so that it travels as one bit
// from then on. Ids are given out by the coordinator and reach every member in the same order of
// responses; a changed request takes over the id of its predecessor. A full cache forgets nothing:
// later names are negotiated in full each time. The coordinator owns the one of rank 0, the
// negotiators of the other ranks theirs; only the runner calls it.
class ResponseCache {
 public:
  explicit ResponseCache(const Config& config)
      : capacity_(static_cast<std::size_t>(
            std::clamp<std::int64_t>(config.cache_capacity, 0, kMaxCacheIds))) {}

  // The id of exactly this request, if every member knows it.
  std::optional<std::uint32_t> find(const std::string& key, const Request& request) const {
    const auto found = ids_.find(key);
    if (found == ids_.end() || !(requests_[found->second] == request)) return std::nullopt;
    return found->second;
  }
  // Coordinator: the id under which to remember `key` from now on, or kNotCached.
  std::uint32_t assign(const std::string& key) const {
    if (const auto found = ids_.find(key); found != ids_.end()) return found->second;
    if (!free_.empty()) return free_.back();
    return requests_.size() < capacity_ ? static_cast<std::uint32_t>(requests_.size()) : kNotCached;
  }
  void remember(std::uint32_t id, const std::string& key, const Request& request) {
    if (id == kNotCached) return;
    if (id >= requests_.size()) requests_.resize(id + 1);
    requests_[id] = request;
    ids_[key] = id;
    std::erase(free_, id);
  }
  // The process set was removed: its ids are free for other requests.
  void forget(std::uint32_t process_set) {
    std::erase_if(ids_, [&](const auto& known) {
      if (requests_[known.second].process_set != process_set) return false;
      free_.push_back(known.second);
      return true;
    });
  }
  // nullptr for an id that was never given out.
  const Request* at(std::uint32_t id) const {
    return id < requests_.size() ? &requests_[id] : nullptr;
  }

 private:
  const std::size_t capacity_;
  std::unordered_map<std::string, std::uint32_t> ids_;
  std::vector<Request> requests_;  // Each id has one, default-made where this rank is not a member.
  // Ids of removed sets that this rank has not seen again. Only the coordinator, which sees all of
  // them, gives ids out.
  std::vector<std::uint32_t> free_;
};

inline constexpr const char* kSameSteps =
    "; call collectives on all ranks, none of them under `if hvd.rank() == 0:`, and give every "
    "rank the same number of steps, or end the loop on every rank with hvd.join(), which a "
    "torch.distributed group does not have";
inline constexpr const char* kJoinAtTheEnd =
    "if ranks have different numbers of steps, end the loop on every rank with hvd.join(), or, "
    "with torch.distributed, give all ranks the same number of steps";

// The error where a rank has left cleanly after so many collectives, and something still needs it:
// `missing` says what, "allreduce 'x' waits for it"; `advice` begins with its punctuation.
Status left_early(int rank, std::uint64_t collectives, const std::string& missing,
                  const std::string& advice = kSameSteps);

// What others read of a coordinator. All are borrowed, and may be null.
struct CoordinatorViews {
  Trace* trace = nullptr;
  StepClock* steps = nullptr;
  Stalls* stalls = nullptr;
};

class Coordinator {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  struct Activity {
    std::string name;  // what the rank submitted last
    TimePoint when;
    std::uint64_t submissions = 0;  // so far
  };

  // With `cuts_at_changes` no round has entries from before and after ranks join, or from before
  // and after a process set goes: an elastic job commits in between, while the members are still
  // those who made the results.
  Coordinator(int size, const Config& config, const CoordinatorViews& views = {},
              bool cuts_at_changes = false);

  // Besides that of the world.
  void add_set(const Group& group);
  // New process sets get ids above this one.
  void skip_ids(std::uint32_t highest) { ids_given_ = std::max(ids_given_, highest); }
  // A rank wants a collective; `sent`: when its program asked for it. kInternal when the rank is
  // not a member of the set, asks twice, has joined, or wants what no rank lets its callers ask
  // for.
  Status submit(int rank, const Request& request, TimePoint now, const Arrival& sent = {});
  Status submit_cached(int rank, std::uint32_t id, TimePoint now, const Arrival& sent = {});
  // A rank left cleanly: what waits for it, now or later, becomes an error for the other members.
  void leave(int rank, std::uint64_t collectives);
  // Fails every pending tensor that has waited since before `since` (stall_shutdown). `rank`
  // is one that is waited for.
  void fail_stalled(TimePoint since, const std::string& reason, int rank);

  // Fails the pending tensor of this key, which is there.
  void fail(PendingTable& table, const std::string& key, const Status& error);
  // All ranks of the world change to these settings between the responses so far and later ones;
  // `settled`: for good.
  void tune(const Tunables& tunables, bool settled);

  // A rank reports that it is blocked (deadlock_watch.h). False: it cannot be read.
  bool reported(int rank, std::span<const std::byte> body, TimePoint now) {
    return deadlock_.reported(rank, body, now);
  }
  // Time has passed: fails ranks that wait for each other, warns of stalls, closes steps of late
  // gradients.
  void tick(TimePoint now);
  // Whether tick() has anything to do.
  bool ticks() const { return !idle() || waited_ || late_.used(); }
  // When it has something to do though nothing else happens.
  TimePoint due() const;
  LateGradients& late_gradients() { return late_; }
  const DeadlockWatch& deadlock_watch() const { return deadlock_; }
  // Lines for the log since the last call.
  std::vector<Notice> take_notices() { return std::exchange(notices_, {}); }

  // Answers the pending tensor of this key, which is there: for late gradients.
  void answer(PendingTable& table, const std::string& key, TimePoint now);
  // What all members know of a request; rank 0 has no other one.
  const ResponseCache& cache() const { return cache_; }

  bool joined(int rank) const { return joined_[rank]; }
  // Whether some rank has joined, and the others have not yet.
  bool joins() const { return joins_; }

  // The responses decided since the last call, in order. The tables that they name stay until the
  // next call.
  std::vector<Response> take_responses();

  const Group& group(std::uint32_t set) const { return tables_.at(set).group; }
  std::map<std::uint32_t, PendingTable>& tables() { return tables_; }
  const Activity& activity(int rank) const { return activity_[rank]; }
  // What a rank has submitted last, for a message: "last called 'x' 2.0 s ago".
  std::string describe_last(int rank, TimePoint now) const;
  // Since when nothing has happened that the pending tensor waits for. Ranks may train for long
  // while others have joined: a join waits only for ranks that do nothing at all.
  TimePoint idle_since(const PendingTable& table, const PendingTensor& pending) const;
  bool idle() const {
    return std::all_of(tables_.begin(), tables_.end(),
                       [](const auto& one) { return one.second.tensors.empty(); });
  }
  // Whether all responses so far have been for all ranks: there is one process set, and no send.
  bool for_all_ranks() const { return tables_.size() == 1 && !sends_; }
  // The members that have submitted the tensor; and those that it waits for.
  static std::vector<int> submitters(const PendingTable& table, const PendingTensor& pending);
  std::vector<int> missing_ranks(const PendingTable& table, const PendingTensor& pending) const;

 private:
  // Whether the tensor waits for this member of its set, unless the member has submitted it.
  bool awaits(const PendingTensor& pending, int rank) const;
  // Returns the pending tensor of the request, a new one where this rank is the first to ask.
  PendingTensor& open(PendingTable& table, int rank, const Request& request, TimePoint now);
  // Answers what waited for this rank alone, and stops waiting for it.
  void join(int rank, TimePoint now);
  void respond(PendingTable& table, PendingTensor pending, TimePoint now);
  // The step clock reads when each rank's program has submitted the tensor.
  void note_step(PendingTensor& pending, const Response& response, TimePoint now);
  void trace_arrival(const PendingTensor& pending, const Request& request, int rank, bool first);
  void trace_answer(const PendingTensor& pending, const Status& error);
  // Returns what makes the request impossible for the ranks that submitted it, or OK.
  static Status refuse(const PendingTable& table, const PendingTensor& pending);
  // Returns what is wrong with the splits of a rank's request, or OK.
  static Status refuse_splits(const PendingTable& table, const PendingTensor& pending, int rank,
                              const Request& request);
  // Names the absent ranks in the response. kInternal when generations have run out.
  Status note_absent(PendingTable& table, const PendingTensor& pending, Response& response);
  // `left_out`: members that have not submitted it, and get the error when they do.
  void respond_error(const PendingTensor& pending, Status error, std::vector<int> left_out = {});
  // As above, where members are missing. The error does not go to them: a request of theirs may be
  // on its way, and opens a new pending tensor.
  void respond_error_to_submitters(const PendingTable& table, const PendingTensor& pending,
                                   const Status& error);
  void cut_round();  // where this world cuts at changes
  // Answers the tensor with an error if it waits for a rank that has left. True: it did.
  bool fail_if_left(const PendingTable& table, const PendingTensor& pending);

  // Changes of the process sets.
  struct FailedChange {
    Status error;
    std::size_t missing = 0;  // ranks that have not made it yet
  };
  PendingTable* find_table(const std::vector<std::int64_t>& ranks);
  // What is wrong with a change that all ranks want.
  std::optional<std::string> describe_bad_change(const Request& request);
  void respond_change(PendingTensor pending);
  // A change cannot go on: all ranks that made it get this error, later ones too.
  void fail_change(const std::string& name, const Status& error);
  // This rank's request is of a change that has failed: it gets the error.
  bool fail_late_change(int rank, const Request& request);
  // The set goes: what still waits there for a member, which will not submit it, gets an error.
  void fail_rest(PendingTable& table);

  const int size_;
  const CoordinatorViews views_;
  const bool cuts_at_changes_;
  LateGradients late_;
  DeadlockWatch deadlock_;
  StallMonitor stalls_;
  std::vector<Notice> notices_;
  bool waited_ = false;  // something was pending at the last tick()
  ResponseCache cache_;
  std::map<std::uint32_t, PendingTable> tables_;
  std::vector<Activity> activity_;                  // The index is a rank.
  std::vector<std::optional<std::uint64_t>> left_;  // The rank had finished so many collectives.
  std::vector<bool> joined_;                        // The index is a rank.
  int last_joined_ = -1;
  bool joins_ = false;
  bool sends_ = false;           // some request was a send
  std::uint32_t ids_given_ = 0;  // ids of sets and generations given out so far
  std::vector<Response> responses_;
  std::uint64_t opened_ = 0;            // pending tensors so far
  std::vector<std::uint32_t> removed_;  // sets whose tables go next
  std::size_t taken_removals_ = 0;      // take_responses() has named so many of them.
  std::unordered_map<std::string, FailedChange> failed_;  // The key is a name.
};

}  // namespace hvdlite
