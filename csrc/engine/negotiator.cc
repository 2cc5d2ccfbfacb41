#include "engine/negotiator.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/text.h"

namespace hvdlite {
namespace {

constexpr Patience kShortest = std::chrono::milliseconds(10);
constexpr Patience kLongest = std::chrono::seconds(5);

}  // namespace

AnswerWatch::AnswerWatch(const Config& config) : warning_(patience_of(config.stall_warning)) {
  const Patience timeout = patience_of(config.collective_timeout);
  const Patience shutdown = patience_of(config.stall_shutdown);
  by_timeout_ = timeout <= shutdown;
  limit_ = by_timeout_ ? config.collective_timeout : config.stall_shutdown;
  const Patience first = std::min({warning_, timeout, shutdown});
  if (first < kForever) interval_ = std::clamp(first / 4, kShortest, kLongest);
}

void AnswerWatch::begin(TimePoint now) {
  heard_ = false;
  asked_ = false;
  since_ = now;
  warns_at_ = warning_;
  due_ = interval_ < kForever ? now + interval_ : TimePoint::max();
}

AnswerWatch::Act AnswerWatch::look(TimePoint now) {
  if (now < due_) return Act::kNothing;
  // This rank itself may have been stopped: then nothing is known of rank 0.
  const bool overslept = now - due_ > std::max(interval_, kLongest);
  if (heard_ || overslept) {
    begin(now);
    return Act::kNothing;
  }
  Act act = Act::kNothing;
  if (!asked_) {
    asked_ = true;
    act = Act::kAsk;
  } else if (silent(now) >= patience_of(limit_)) {
    return Act::kFail;
  } else if (silent(now) >= warns_at_) {
    warns_at_ = 2 * silent(now);
    act = Act::kWarn;
  }
  due_ = since_ + std::min(warns_at_, patience_of(limit_));
  return act;
}
namespace {

using Clock = std::chrono::steady_clock;

Status garbage(const Frame& frame) {
  return Status(StatusCode::kInternal,
                "rank " + std::to_string(frame.from) +
                    " sent a message that cannot be read (type " +
                    std::to_string(static_cast<int>(frame.type)) + ")",
                frame.from);
}

// How many of Response::first_dimensions an answer to this request brings.
std::size_t rows_due(const Request& request, std::size_t members) {
  if (request.kind == Kind::kAllgather) return members * request.tensors.size();
  return request.kind == Kind::kAlltoall ? members : 0;
}

// Whether the answer is one to this request of a rank, in a process set of so many members.
bool fits(const Response& response, const Request& request, std::size_t members) {
  return response.first_dimensions.size() == rows_due(request, members) &&
         (response.set_id >= 0) == request.changes_process_sets() &&
         (response.last_joined >= 0) == (request.kind == Kind::kJoin);
}

}  // namespace

Negotiator::Negotiator(EngineParts& parts, bool elastic)
    : rank_(parts.rank),
      size_(parts.size),
      elastic_(elastic),
      sets_(parts.sets),
      queue_(parts.queue),
      counters_(parts.counters),
      live_(parts.live),
      late_(parts.late),
      waiter_(*parts.fabric->waiter),
      patience_(parts.config.collective_timeout),
      control_(*parts.fabric),
      own_cache_(parts.config),
      answers_(parts.config),
      left_(size_) {
  if (rank_ != kCoordinatorRank) return;
  const CoordinatorViews views{parts.trace.get(), &live_.steps, &live_.stalls};
  coordinator_ = std::make_unique<Coordinator>(size_, parts.config, views, elastic);
  for (const GroupPtr& set : sets_.others()) coordinator_->add_set(*set);
  coordinator_->skip_ids(static_cast<std::uint32_t>(sets_.highest()));
}

void Negotiator::send(int rank, const Bytes& frame) {
  control_.send(rank, frame);
  counters_.messages_sent = control_.frames_sent();
}

void Negotiator::submit(const std::vector<EntryPtr>& entries) {
  Submit message;
  if (!coordinator_ && pending_.empty() && !entries.empty()) {
    answers_.begin(LiveFigures::time_of(entries.front()->submitted_at));
  }
  for (const EntryPtr& entry : entries) {
    if (!entry->request.late || !late_.take(entry)) pending_[entry->key] = entry;
    const auto id = cache().find(entry->key, entry->request);
    ++(id ? counters_.cache_hits : counters_.full_requests);
    if (coordinator_) {
      // Its own queue has refused duplicates and foreign sets, so this cannot fail.
      (void)coordinator_->submit(rank_, entry->request, Clock::now(), LiveFigures::own(*entry));
      continue;
    }
    if (id) {
      message.cached.push_back(*id);
    } else {
      message.requests.push_back(entry->request);
    }
    if (entry->request.of_a_step()) {
      message.stamps.add(entry->began_at + live_.clock_offset);
      message.stamps.add(entry->submitted_at + live_.clock_offset);
    }
  }
  if (!message.cached.empty() || !message.requests.empty()) {
    send(kCoordinatorRank, encode_submit(message));
  }
}

void Negotiator::note_blocked(std::vector<EntryPtr> waits, std::vector<std::string> places) {
  places.resize(waits.size());
  NotedBlocked noted{std::move(waits), std::move(places), queue_.pushed()};
  std::optional<NotedBlocked> dropped;  // once the lock is released
  {
    MutexLock lock(blocked_mutex_);
    if (ended_) return;
    dropped = std::exchange(blocked_, std::move(noted));
  }
  blocked_noted_.store(true, std::memory_order_seq_cst);
}

void Negotiator::report() {
  if (!blocked_noted_.load(std::memory_order_seq_cst)) return;
  blocked_noted_.store(false);
  std::optional<NotedBlocked> noted;
  {
    MutexLock lock(blocked_mutex_);
    noted = std::exchange(blocked_, std::nullopt);
  }
  if (!noted) return;
  Blocked blocked = describe_blocked(*noted);
  if (blocked == reported_ || (blocked.keys.empty() && reported_.keys.empty())) return;
  reported_ = std::move(blocked);
  const Bytes body = encode(reported_);
  if (coordinator_) {
    (void)coordinator_->reported(rank_, body, Clock::now());  // Its own report can be read.
  } else {
    send(kCoordinatorRank, encode_report(body));
  }
}

Blocked Negotiator::describe_blocked(const NotedBlocked& noted) const {
  const std::uint64_t submitted = counters_.cache_hits.get() + counters_.full_requests.get();
  // What was agreed while this rank was in a collective is still to run.
  const bool quiet = served_.empty() && unhandled_.empty();
  if (!quiet || submitted != noted.submitted) return {};
  Blocked blocked{submitted, static_cast<std::uint32_t>(pending_.size()), {}, noted.places};
  for (const EntryPtr& entry : noted.waits) {
    const auto found = pending_.find(entry->key);
    if (found == pending_.end() || found->second != entry) return {};
    blocked.keys.push_back(entry->key);
  }
  if (blocked.keys.empty()) return {};
  // A continuation may submit.
  for (const auto& [key, entry] : pending_) {
    if (entry->completion->has_continuation()) blocked.keys.push_back(key);
  }
  blocked.places.resize(blocked.keys.size());
  return blocked;
}

Status Negotiator::receive(std::vector<Round>& rounds) {
  control_.poll();
  // Ends first taken, then frames: a frame always precedes its sender's end.
  const auto ended = control_.take_ended();
  Status failure = std::exchange(failure_, Status());
  std::vector<Frame> frames = std::exchange(unhandled_, {});
  for (Frame& frame : control_.take_frames()) frames.push_back(std::move(frame));
  std::move(served_.begin(), served_.end(), std::back_inserter(rounds));
  served_.clear();
  for (const Frame& frame : frames) {
    Status status = handle(frame, rounds);
    if (failure.ok()) failure = std::move(status);
  }
  for (const auto& [rank, why] : ended) {
    Status status = handle_ended(rank, why);
    if (failure.ok()) failure = std::move(status);
  }
  if (!failure.ok()) {
    control_.poll();
    listen_for_causes();
    return told_.ok() ? failure : told_;
  }
  if (!coordinator_) {
    // What this rank passes on comes before it enters a collective, in which it may pass on
    // nothing; but others may be in there already, wait for it, and read nothing.
    if (control_.passes_on() && !rounds.empty()) flush_what_is_read();
    HVDLITE_RETURN_IF_ERROR(look_at_rank_0());
    return unanswered();
  }
  if (coordinator_->ticks()) coordinator_->tick(Clock::now());
  HVDLITE_RETURN_IF_ERROR(coordinate(rounds));
  return coordinator_->idle() || control_.cut_off().empty() ? Status()
                                                            : unreachable(control_.cut_off()[0]);
}

Status Negotiator::handle(const Frame& frame, std::vector<Round>& rounds) {
  if (frame.from == kCoordinatorRank) answers_.heard();
  switch (frame.type) {
    case FrameType::kSubmit:
      return handle_submit(frame);
    case FrameType::kRespond: {
      std::vector<Response> responses;
      if (frame.from != kCoordinatorRank || !decode_respond(frame.body, responses)) break;
      return accept(responses, rounds);
    }
    case FrameType::kAbort: {
      Status cause;
      if (!decode_abort(frame.body, cause)) break;
      hear_cause(std::move(cause));
      return told_;
    }
    case FrameType::kGoodbye:
      return handle_goodbye(frame);
    case FrameType::kReport:
      if (!coordinator_ || !coordinator_->reported(frame.from, frame.body, Clock::now())) break;
      return Status();
    case FrameType::kMore:
    case FrameType::kBundle:
    case FrameType::kEnded:
      break;
  }
  return garbage(frame);
}

Status Negotiator::handle_submit(const Frame& frame) {
  Submit message;
  if (!coordinator_ || !decode_submit(frame.body, message)) return garbage(frame);
  // The rank asks whether this engine still answers.
  if (message.cached.empty() && message.requests.empty()) {
    send(frame.from, encode_respond({}));
  }
  const auto now = Clock::now();
  const Arrival sent = live_.arrival(message.stamps, now);
  for (const std::uint32_t id : message.cached) {
    HVDLITE_RETURN_IF_ERROR(coordinator_->submit_cached(frame.from, id, now, sent));
  }
  for (const Request& request : message.requests) {
    HVDLITE_RETURN_IF_ERROR(coordinator_->submit(frame.from, request, now, sent));
  }
  return Status();
}

Status Negotiator::handle_goodbye(const Frame& frame) {
  std::uint64_t collectives = 0;
  if (!decode_goodbye(frame.body, collectives)) return garbage(frame);
  left_[frame.from] = collectives;
  if (coordinator_) coordinator_->leave(frame.from, collectives);
  return Status();
}

Status Negotiator::accept(const std::vector<Response>& responses, std::vector<Round>& rounds) {
  Round round;
  Status failure;
  const auto end_round = [&] {
    if (round.tunables || !round.entries.empty()) rounds.push_back(std::exchange(round, {}));
  };
  for (const Response& response : responses) {
    if (response.form == Response::Form::kCut) {
      end_round();
      continue;
    }
    if (response.form == Response::Form::kTune) {
      end_round();
      round.tunables = response.tunables;
      round.settled = response.settled;
      continue;
    }
    failure = accept_one(response, round);
    if (!failure.ok()) break;
  }
  end_round();
  return failure;
}

Status Negotiator::accept_one(const Response& response, Round& round) {
  const Request* request = &response.request;
  if (response.form == Response::Form::kCached) request = cache().at(response.cache_id);
  const std::string key = request == nullptr ? "" : request->key();
  const auto found = pending_.find(key);
  EntryPtr entry = found == pending_.end() ? nullptr : found->second;
  const bool sticky = response.form == Response::Form::kError && response.error.sticky();
  if (sticky && elastic_) return response.error;  // the entry is suspended with all others
  if (entry != nullptr) pending_.erase(found);
  const std::vector<int>& out = response.left_out;
  const bool left_out = std::binary_search(out.begin(), out.end(), rank_);
  if (response.form == Response::Form::kError) {
    if (entry != nullptr) {
      if (entry->request.kind == Kind::kRemoveProcessSet) queue_.reopen(entry->removes);
      queue_.finish(entry, response.error);
    } else if (left_out) {
      late_.failed_without(key, response.error);
    }
    return sticky ? response.error : Status();
  }
  if (response.form == Response::Form::kFull && !coordinator_) {
    own_cache_.remember(response.cache_id, key, response.request);
  }
  const std::vector<int>& absent = response.absent;
  const bool joined = std::binary_search(absent.begin(), absent.end(), rank_);
  if (joined && entry == nullptr) return Status();
  if (left_out && request != nullptr && request->late) {
    HVDLITE_ASSIGN_OR_RETURN(entry, late_.answered_without(*request, out, std::move(entry)));
  } else if (entry != nullptr && entry->request.late) {
    late_.answered(*entry, out);
  }
  if (entry == nullptr) {
    return Status(StatusCode::kInternal,
                  "the coordinator answered '" + key + "', which this rank has not submitted");
  }
  const GroupPtr set = sets_.get(entry->request.process_set);
  if (joined || set == nullptr || !fits(response, entry->request, set->ranks.size())) {
    const Status misfit(StatusCode::kInternal, "the coordinator's answer to " +
                                                   describe(entry->request) +
                                                   " does not fit what this rank has submitted");
    queue_.finish(entry, misfit);
    return misfit;
  }
  if (request->kind == Kind::kRemoveProcessSet) {
    own_cache_.forget(entry->removes);
    late_.forget(entry->removes);
  }
  if (request->kind == Kind::kJoin) late_.all_joined();
  round.entries.push_back({std::move(entry), response.first_dimensions, absent, response.generation,
                           response.set_id, response.last_joined});
  return Status();
}

bool Negotiator::awaited() const {
  if (control_.awaited()) return true;
  if (!coordinator_ || coordinator_->for_all_ranks()) return false;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && !left_[rank] && !control_.ended(rank)) return true;
  }
  return false;
}

Deadline Negotiator::wake_at() const {
  const Deadline deadline = must_wake_at();
  return waits_for_rank_0() ? deadline.earlier(Deadline::at(answers_.due())) : deadline;
}

Deadline Negotiator::must_wake_at() const {
  if (const auto held = control_.held_until()) return Deadline::after(*held - Clock::now());
  if (!coordinator_ || coordinator_->idle()) return Deadline::never();
  return Deadline::after(coordinator_->due() - Clock::now());
}

std::vector<EntryPtr> Negotiator::take_pending() {
  std::optional<NotedBlocked> dropped;  // once the lock is released
  {
    MutexLock lock(blocked_mutex_);
    ended_ = true;
    dropped = std::exchange(blocked_, std::nullopt);
  }
  std::vector<EntryPtr> entries;
  for (auto& [key, entry] : pending_) entries.push_back(std::move(entry));
  pending_.clear();
  for (Round& round : served_) {
    for (Agreed& agreed : round.entries) entries.push_back(std::move(agreed.entry));
  }
  served_.clear();
  return entries;
}

// The negotiator of rank 0: what it answers to the other ranks, and to its own; and what a leader
// of a control tree passes on meanwhile.
namespace {

// So long peers may take to read something, where they may also be in a collective in which they
// read nothing.
constexpr auto kReadTime = std::chrono::milliseconds(10);

// The member's part of a response: of an alltoall only the rows that it receives itself. (An error
// has no kind.)
Response addressed_part(const Response& response, const Group& group, std::size_t index) {
  if (response.request.kind != Kind::kAlltoall) return response;
  Response part;
  part.form = response.form;
  part.cache_id = response.cache_id;
  part.request = response.request;
  part.absent = response.absent;
  part.generation = response.generation;
  const std::size_t members = group.ranks.size();
  const auto begin =
      response.first_dimensions.begin() + static_cast<std::ptrdiff_t>(index * members);
  part.first_dimensions.assign(begin, begin + static_cast<std::ptrdiff_t>(members));
  return part;
}

// The responses of `all` that concern `rank`.
std::vector<Response> addressed_to(int rank, const std::vector<Response>& all,
                                   const Coordinator& coordinator) {
  std::vector<Response> own;
  for (const Response& response : all) {
    if (response.of_all()) {
      own.push_back(response);
      continue;
    }
    if (!response.request.concerns(rank)) continue;
    const std::vector<int>& only = response.recipients;
    if (!only.empty() && !std::binary_search(only.begin(), only.end(), rank)) continue;
    const Group& group = coordinator.group(response.request.process_set);
    const int index = group.index_of(rank);
    if (index >= 0) own.push_back(addressed_part(response, group, static_cast<std::size_t>(index)));
  }
  return own;
}

}  // namespace

bool Negotiator::serves() const {
  if (control_.unsent() > 0) return true;
  if (!coordinator_) return control_.passes_on() && !sets_.others().empty();
  return !coordinator_->for_all_ranks() || coordinator_->late_gradients().used() ||
         coordinator_->joins();
}

void Negotiator::serve() {
  if (!coordinator_) {
    control_.poll();
    return;
  }
  LateGradients& late = coordinator_->late_gradients();
  const auto due = late.due();
  const auto now = Clock::now();
  const bool is_due = due && now >= *due;
  if (!control_.poll() && !is_due) return;
  if (is_due) late.tick(now);
  for (Frame& frame : control_.take_frames()) {
    // The coordinator reads submissions and reports in the order in which they came.
    if (frame.type != FrameType::kSubmit && frame.type != FrameType::kReport) {
      unhandled_.push_back(std::move(frame));
    } else if (Status status = handle(frame, served_); failure_.ok()) {
      failure_ = std::move(status);
    }
  }
  const std::vector<Response> responses = coordinator_->take_responses();
  if (responses.empty()) return;
  if (Status status = accept(distribute(responses), served_); failure_.ok()) {
    failure_ = std::move(status);
  }
}

Status Negotiator::coordinate(std::vector<Round>& rounds) {
  const bool is_awaited = !rounds.empty();
  const std::vector<Response> responses = coordinator_->take_responses();
  for (const Notice& notice : coordinator_->take_notices()) tell(notice);
  if (!responses.empty()) {
    HVDLITE_RETURN_IF_ERROR(accept(distribute(responses), rounds));
  }
  if (rounds.empty()) return Status();
  // Others may be in the first of these collectives already, wait for this rank, and read nothing.
  // What is left moves while this rank is in there, too.
  if (is_awaited) {
    flush_what_is_read();
    return Status();
  }
  // All that was answered before has run here, so nobody waits for this rank, and all will read.
  // The members have all of it before this rank enters the first of these collectives: to launch
  // work of a GPU may block, and then nothing moves.
  return flush_answers();
}

void Negotiator::tell(const Notice& notice) {
  log(LogLevel::kWarning, rank_, notice.text);
  live_.events.add(notice.event, notice.rank, notice.name, notice.text);
}

Status Negotiator::flush(Patience patience) {
  const auto flushed = [&] { return control_.flush(); };
  const auto never_fails = [] { return Status(); };
  Status status;
  std::size_t left = 0;
  do {
    left = control_.unsent();
    status = waiter_.wait(flushed, never_fails, Deadline::after(patience));
    // A slow link is not a peer that does not read.
  } while (status.code() == StatusCode::kTimeout && control_.unsent() < left);
  return status;
}

void Negotiator::flush_what_is_read() { (void)flush(kReadTime); }

Status Negotiator::flush_answers() {
  const Status status = flush(patience_of(patience_));
  if (status.code() != StatusCode::kTimeout) return status;
  const std::vector<int> ranks = control_.unread();
  std::string names;
  for (const int rank : ranks) names += (names.empty() ? "" : ", ") + std::to_string(rank);
  return Status(
      StatusCode::kTimeout,
      (ranks.size() == 1 ? "rank " : "ranks ") + names +
          " did not read what rank 0 answered within collective_timeout (stopped, or busy "
          "in a callback?)",
      ranks.front());
}

std::vector<Response> Negotiator::distribute(const std::vector<Response>& responses) {
  const bool same_for_all = coordinator_->tables().size() == 1 &&
                            std::none_of(responses.begin(), responses.end(), [](const auto& one) {
                              return one.request.kind == Kind::kAlltoall || one.request.is_send() ||
                                     !one.recipients.empty();
                            });
  const Bytes frame = same_for_all ? encode_respond(responses) : Bytes();
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    if (same_for_all) {
      send(rank, frame);
    } else if (const auto own = addressed_to(rank, responses, *coordinator_); !own.empty()) {
      send(rank, encode_respond(own));
    }
  }
  (void)control_.flush();  // What others pass on is on its way before this rank sleeps.
  return same_for_all ? responses : addressed_to(rank_, responses, *coordinator_);
}

// The negotiator's part in the ends of ranks: what their going means for this rank, the root cause
// where several tell one, and the last words of this rank itself.
namespace {

constexpr auto kAnnounceTime = std::chrono::milliseconds(200);
constexpr auto kLastWordsTime = std::chrono::milliseconds(200);
// Both of these in an elastic job.
constexpr auto kElasticTime = std::chrono::milliseconds(5);

}  // namespace

Status Negotiator::handle_ended(int rank, Status why) {
  if (why.code() == StatusCode::kInternal) return why;
  if (left_[rank]) return Status();
  if (why.code() == StatusCode::kTimeout) {
    return Status(StatusCode::kRankFailed, why.message(), rank);
  }
  return Status(StatusCode::kRankFailed,
                "rank " + std::to_string(rank) +
                    " died: its connections closed without a goodbye (killed, crashed, or out of "
                    "memory; see the launcher's report)",
                rank);
}

Status Negotiator::unreachable(const ControlPlane::CutOff& cut) const {
  const auto wanted = std::find_if(pending_.begin(), pending_.end(), [&](const auto& one) {
    const GroupPtr set = sets_.get(one.second->request.process_set);
    return set != nullptr && set->index_of(cut.leader) >= 0 &&
           one.second->request.concerns(cut.leader);
  });
  if (left_[cut.leader] && wanted != pending_.end()) {
    return left_early(cut.leader, *left_[cut.leader],
                      describe(wanted->second->request) + " waits for it");
  }
  return Status(StatusCode::kRankFailed,
                "rank " + std::to_string(cut.rank) +
                    " cannot be reached any more: control messages to it went through rank " +
                    std::to_string(cut.leader) +
                    ", which has left; end the program on every rank with hvd.barrier()",
                cut.rank);
}

Status Negotiator::unanswered() const {
  for (const ControlPlane::CutOff& cut : control_.cut_off()) {
    if (!pending_.empty() && cut.rank == kCoordinatorRank) return unreachable(cut);
  }
  constexpr int kLeft = kCoordinatorRank;
  // All that it has answered is there once its stream has ended.
  if (pending_.empty() || !left_[kLeft] || !control_.ended(kLeft)) return Status();
  const Request& request = pending_.begin()->second->request;
  const GroupPtr set = sets_.get(request.process_set);
  if (set == nullptr || (set->index_of(kLeft) >= 0 && request.concerns(kLeft))) {
    return left_early(kLeft, *left_[kLeft], describe(request) + " waits for it");
  }
  return left_early(kLeft, *left_[kLeft],
                    describe(request) + " of " + describe(*set) + " waits for it",
                    ": rank 0 decides for all process sets; end the program on every rank with "
                    "hvd.barrier()");
}

Status Negotiator::root_cause(Status fallback) {
  // The data plane may see a peer go before that peer's last words arrive on the control channel.
  const Deadline deadline = Deadline::after(elastic_ ? kElasticTime : kLastWordsTime);
  const int rank = fallback.failed_rank();
  const bool expected = fallback.code() == StatusCode::kRankFailed && rank >= 0 && rank != rank_;
  while (true) {
    control_.poll();
    listen_for_causes();
    if (!told_.ok()) return told_;
    if (!expected || control_.ended(rank) || deadline.passed()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (const auto& [ended, why] : control_.take_ended()) {
    Status status = handle_ended(ended, why);
    if (!status.ok()) return status;
  }
  if (expected && left_[rank]) {
    return left_early(rank, *left_[rank], "a collective was under way with it");
  }
  return fallback;
}

void Negotiator::listen_for_causes() {
  for (const Frame& frame : std::exchange(unhandled_, {})) listen_for_cause(frame);
  for (const Frame& frame : control_.take_frames()) listen_for_cause(frame);
}

void Negotiator::listen_for_cause(const Frame& frame) {
  Status cause;
  if (frame.type == FrameType::kAbort && decode_abort(frame.body, cause)) {
    hear_cause(std::move(cause));
  } else if (frame.type == FrameType::kGoodbye) {
    (void)handle_goodbye(frame);
  }
}

void Negotiator::hear_cause(Status cause) {
  if (!told_.ok()) return;
  told_ = std::move(cause);
  // The peer has shut down; to this rank, which goes on, it has failed.
  if (elastic_ && told_.code() == StatusCode::kShutdown) {
    told_ = Status(StatusCode::kRankFailed, told_.message(), told_.failed_rank());
  }
}

void Negotiator::send_all(const Bytes& frame, Deadline deadline) {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) send(rank, frame);
  }
  while (!control_.flush() && !deadline.passed()) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void Negotiator::announce_abort(const Status& cause) {
  send_all(encode_abort(cause), Deadline::after(elastic_ ? kElasticTime : kAnnounceTime));
}

void Negotiator::announce_goodbye(std::uint64_t collectives) {
  send_all(encode_goodbye(collectives), Deadline::after(kAnnounceTime));
}

// The negotiator's part in what waits for long: whether rank 0 and peers in a collective still act.

Status Negotiator::look_at_rank_0() {
  if (!std::exchange(slept_, false) || !waits_for_rank_0()) return Status();
  const auto now = std::chrono::steady_clock::now();
  const AnswerWatch::Act act = answers_.look(now);
  if (act == AnswerWatch::Act::kNothing) return Status();
  if (act == AnswerWatch::Act::kAsk) {
    send(kCoordinatorRank, encode_submit({}));
    return Status();
  }
  const Request& request = pending_.begin()->second->request;
  const std::string text = describe(request) +
                           " waits for rank 0, whose engine does not answer "
                           "(stopped, or busy in a callback?)";
  if (act == AnswerWatch::Act::kFail) {
    return Status(answers_.given_up(), text, kCoordinatorRank);
  }
  tell({"stall", kCoordinatorRank, request.name, text});
  return Status();
}

void Negotiator::tell_of_silence(const SilentPeer& peer, const Request* request) {
  const double seconds = std::chrono::duration<double>(peer.waited).count();
  std::string text = "rank " + std::to_string(peer.rank) + " has called " +
                     (request == nullptr ? peer.operation : describe(*request)) + ", but " +
                     peer.owes + " for " + text_of_fixed(seconds, 1) + " s";
  if (coordinator_) {
    text += " (" + coordinator_->describe_last(peer.rank, std::chrono::steady_clock::now()) + ")";
  }
  text += "; is it suspended or overloaded, or its link down?";
  tell({"stall", peer.rank, request == nullptr ? "" : request->name, text});
}

}  // namespace hvdlite
