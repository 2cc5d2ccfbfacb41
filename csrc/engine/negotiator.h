// This rank's side of the negotiation: hands submitted entries to the coordinator, and turns its
// responses into rounds of agreed entries.
//
// A *round* is what one respond frame holds for this rank, cut where the settings change. Every
// member of a process set gets the same rounds for that set, so what is planned from one round
// alone is planned alike everywhere. Rank 0 holds the coordinator and takes part as the others do.
//
// Engine owns it; only the runner calls it, except note_blocked().
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/config.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "base/status.h"
#include "engine/entry.h"
#include "engine/parts.h"
#include "negotiation/control_plane.h"
#include "negotiation/coordinator.h"
#include "negotiation/process_set.h"

namespace hvdlite {

// Whether rank 0 still answers, as a rank sees it that waits for an answer. An answer may take as
// long as other ranks do; so who has heard nothing for a while asks rank 0's engine for a sign of
// life, which needs nothing of rank 0's program.
//
// A pure state machine without a clock. The negotiator of a rank other than 0 owns it, and only the
// runner calls it.
class AnswerWatch {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  enum class Act { kNothing, kAsk, kWarn, kFail };

  explicit AnswerWatch(const Config& config);

  // From here on something waits for an answer, and nothing did.
  void begin(TimePoint now);
  // Rank 0 has sent something.
  void heard() { heard_ = true; }
  // When look() has something to do.
  TimePoint due() const { return due_; }
  // What is to be done now: ask rank 0; warn, which comes again whenever it has been silent for
  // twice as long; or give up.
  Act look(TimePoint now);
  // So long it has been silent.
  Patience silent(TimePoint now) const { return now - since_; }
  StatusCode given_up() const { return by_timeout_ ? StatusCode::kTimeout : StatusCode::kStalled; }

 private:
  Patience warning_;  // kForever: none
  // After so many seconds a silent rank is given up: collective_timeout, where this one is shorter,
  // or else stall_shutdown. 0: never.
  double limit_ = 0;
  bool by_timeout_ = false;
  Patience interval_ = kForever;
  bool heard_ = false;
  bool asked_ = false;
  TimePoint since_;
  Patience warns_at_{0};  // The silence may last so long without a warning.
  TimePoint due_ = TimePoint::max();
};

inline constexpr int kCoordinatorRank = 0;

class Negotiator {
 public:
  // Borrows the parts of the engine, which outlives this.
  Negotiator(EngineParts& parts, bool elastic);

  void submit(const std::vector<EntryPtr>& entries);
  // Any thread: all threads of this rank that could submit something wait for these entries, at
  // these places (Blocked::places); with none of them: not any more. The next submission makes it
  // void.
  void note_blocked(std::vector<EntryPtr> waits, std::vector<std::string> places);
  // Tells rank 0 so, where it was noted (negotiation/deadlock_watch.h).
  void report();
  // True when bytes wait to be looked at. This is cheap enough for a spinning ready().
  bool poll() {
    return control_.poll() || !served_.empty() || !unhandled_.empty() || !failure_.ok() ||
           blocked_noted_.load(std::memory_order_seq_cst);
  }
  // Handles what has arrived and appends the rounds that are ready to execute, in order. A failed
  // status ends the world: it is the root cause, as far as any peer told it; `rounds` then holds
  // entries that this negotiator no longer keeps.
  Status receive(std::vector<Round>& rounds);
  // While this rank is in a collective: rank 0 goes on answering the others, and leaders passing on
  // what they say, so that process sets and sends without this rank do not wait for it; and what no
  // channel has taken yet moves on. What concerns this rank waits for receive().
  void serve();
  // Whether serve() has anything to do in this world, or is to move something on.
  bool serves() const;
  // Done with the own work: whether others still need this rank. Rank 0 decides for process sets
  // and sends without it, and the leaders of a control tree pass on what others say.
  bool awaited() const;
  // Rank 0: all ranks change to these settings, between the same two rounds; `settled`: for good.
  void tune(const Tunables& tunables, bool settled) { coordinator_->tune(tunables, settled); }
  // Returns why a rank is gone that the data plane misses, from what it or others said before;
  // `fallback` when none of them said anything.
  Status root_cause(Status fallback);

  // The time until which the runner may sleep before receive() must run again; and the one that
  // counts also while no thread waits for a result.
  Deadline wake_at() const;
  Deadline must_wake_at() const;
  // The runner has slept until then, or for an unknown time.
  void note_sleep() { slept_ = true; }
  // This rank waits for the peer inside a collective on this request (null: on none), and the
  // peer brings nothing.
  void tell_of_silence(const SilentPeer& peer, const Request* request);
  // Tells every peer the root cause, or that this rank leaves cleanly, as far as it gets through.
  void announce_abort(const Status& cause);
  void announce_goodbye(std::uint64_t collectives);
  // Returns the entries that receive() has not handed out, and forgets them.
  std::vector<EntryPtr> take_pending();
  std::size_t pending() const { return pending_.size() + served_.size(); }
  const ControlTraffic& traffic() const { return control_.traffic(); }

 private:
  struct NotedBlocked {
    std::vector<EntryPtr> waits;
    std::vector<std::string> places;
    std::uint64_t submitted = 0;  // operations of this rank until then
  };
  Blocked describe_blocked(const NotedBlocked& noted) const;
  Status handle(const Frame& frame, std::vector<Round>& rounds);
  Status handle_submit(const Frame& frame);
  Status handle_goodbye(const Frame& frame);
  Status handle_ended(int rank, Status why);
  // The error where rank 0 has left and this rank wants something, which will not be answered.
  Status unanswered() const;
  // The error where this rank wants something, and a rank that matters for it is cut off.
  Status unreachable(const ControlPlane::CutOff& cut) const;
  void listen_for_causes();
  void listen_for_cause(const Frame& frame);
  void hear_cause(Status cause);
  // Rank 0's answers.
  Status coordinate(std::vector<Round>& rounds);
  void tell(const Notice& notice);  // in the log, and as an event
  // Waits until all that is on its way has left; kTimeout when nothing of it did for the patience.
  // Only who reads makes room, and ranks in a collective need not read: where one of them may wait
  // for this rank, it must not wait for room.
  Status flush(Patience patience);
  void flush_what_is_read();
  Status flush_answers();  // kTimeout names the ranks that do not read them
  // Sends the responses to the other members; gives those for this rank.
  std::vector<Response> distribute(const std::vector<Response>& responses);
  Status accept(const std::vector<Response>& responses, std::vector<Round>& rounds);
  Status accept_one(const Response& response, Round& round);
  // On other ranks than 0: whether that one still answers.
  Status look_at_rank_0();
  bool waits_for_rank_0() const { return !coordinator_ && !pending_.empty(); }
  void send(int rank, const Bytes& frame);  // and counts it
  void send_all(const Bytes& frame, Deadline deadline);

  const ResponseCache& cache() const { return coordinator_ ? coordinator_->cache() : own_cache_; }

  const int rank_;
  const int size_;
  const bool elastic_;  // the registrar says who is gone, so this rank does not wait to hear it
  const ProcessSets& sets_;
  TensorQueue& queue_;
  Counters& counters_;
  LiveFigures& live_;
  LateResults& late_;
  Waiter& waiter_;
  const double patience_;  // seconds that a peer may take to read its answers
  ControlPlane control_;
  ResponseCache own_cache_;  // not on rank 0
  AnswerWatch answers_;
  bool slept_ = false;  // since look_at_rank_0() was called last

  std::unique_ptr<Coordinator> coordinator_;           // rank 0 only
  std::unordered_map<std::string, EntryPtr> pending_;  // submitted, no response yet; by key
  std::vector<std::optional<std::uint64_t>> left_;     // The rank has left cleanly after so many.
  Status told_;                                        // the first abort that a peer sent
  Blocked reported_;                                   // last
  std::atomic<bool> blocked_noted_{false};
  Mutex blocked_mutex_;
  bool ended_ HVDLITE_GUARDED_BY(blocked_mutex_) = false;
  // Since the last report().
  std::optional<NotedBlocked> blocked_ HVDLITE_GUARDED_BY(blocked_mutex_);
  // What serve() leaves for receive().
  std::vector<Frame> unhandled_;
  std::vector<Round> served_;
  Status failure_;
};

}  // namespace hvdlite
