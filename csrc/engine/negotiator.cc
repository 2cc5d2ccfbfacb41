#include "engine/negotiator.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/log.h"

namespace hvdlite {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kAnnounceTime = std::chrono::milliseconds(200);
constexpr auto kLastWordsTime = std::chrono::milliseconds(200);
// Both of these in an elastic job.
constexpr auto kElasticTime = std::chrono::milliseconds(5);

Status garbage(const Frame& frame) {
  return Status(StatusCode::kInternal,
                "rank " + std::to_string(frame.from) +
                    " sent a message that cannot be read (type " +
                    std::to_string(static_cast<int>(frame.type)) + ")",
                frame.from);
}

std::size_t cache_capacity(const Config& config) {
  return static_cast<std::size_t>(std::clamp<std::int64_t>(config.cache_capacity, 0, kMaxCacheIds));
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
    if (response.form == Response::Form::kTune || response.form == Response::Form::kCut) {
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

Negotiator::Negotiator(Fabric& fabric, const ProcessSets& sets, const Config& config,
                       TensorQueue& queue, Counters& counters, LiveFigures& live,
                       Attendance& attendance, const Timeline& timeline, bool elastic)
    : rank_(fabric.topology.rank),
      size_(fabric.topology.size),
      elastic_(elastic),
      sets_(sets),
      queue_(queue),
      counters_(counters),
      live_(live),
      waiter_(*fabric.waiter),
      patience_(config.collective_timeout),
      control_(fabric),
      cache_(cache_capacity(config)),
      late_(rank_, queue, attendance),
      left_(size_) {
  if (rank_ != kCoordinatorRank) return;
  coordinator_ =
      std::make_unique<Coordinator>(size_, cache_capacity(config), &timeline, elastic, &live.steps);
  coordinator_->add_set(*sets.get(0));
  for (const GroupPtr& set : sets.others()) coordinator_->add_set(*set);
  coordinator_->skip_ids(static_cast<std::uint32_t>(sets.highest()));
  stalls_ = std::make_unique<StallMonitor>(config, *coordinator_);
  deadlocks_ = std::make_unique<DeadlockWatch>(config.deadlock_grace, *coordinator_);
  next_stall_check_ = Clock::now() + stalls_->interval();
}

void Negotiator::submit(const std::vector<EntryPtr>& entries) {
  Submit message;
  if (!entries.empty()) reported_ = {};
  for (const EntryPtr& entry : entries) {
    if (!entry->request.roll || !late_.take(entry)) pending_[entry->key] = entry;
    const auto id = cache_.find(entry->key, entry->request);
    ++(id ? counters_.cache_hits : counters_.full_requests);
    if (coordinator_) {
      // Its own queue has refused duplicates and foreign sets, so this cannot fail.
      const auto sent = LiveFigures::time_of(entry->submitted_at);
      (void)coordinator_->submit(rank_, entry->request, Clock::now(),
                                 {sent, sent, entry->after_wait});
      continue;
    }
    if (id) {
      message.cached.push_back(*id);
    } else {
      message.requests.push_back(entry->request);
    }
    if (entry->request.of_a_step()) message.stamps.add(entry->submitted_at + live_.clock_offset);
  }
  if (!message.cached.empty() || !message.requests.empty()) {
    control_.send(kCoordinatorRank, encode_submit(message));
  }
  counters_.messages_sent = control_.frames_sent();
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
  if (!coordinator_) return unanswered();
  if (coordinator_->idle()) {
    live_.stalls.clear();
  } else {
    look_at_waits(Clock::now());
  }
  return coordinate(rounds);
}

Status Negotiator::handle(const Frame& frame, std::vector<Round>& rounds) {
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
    case FrameType::kBlocked:
      if (!note_blocked(frame)) break;
      return Status();
    case FrameType::kMore:
      break;
  }
  return garbage(frame);
}

Status Negotiator::handle_submit(const Frame& frame) {
  Submit message;
  if (!coordinator_ || !decode_submit(frame.body, message)) return garbage(frame);
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

Status Negotiator::unanswered() const {
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

void Negotiator::serve() {
  const auto due = coordinator_->rolls_due();
  const auto now = Clock::now();
  const bool is_due = due && now >= *due;
  if (!control_.poll() && !is_due) return;
  if (is_due) coordinator_->close_rolls(now);
  for (Frame& frame : control_.take_frames()) {
    if (!is_for_coordinator(frame.type)) {
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

Status Negotiator::coordinate(std::vector<Round>& rounds) {
  if (coordinator_->rolls()) coordinator_->close_rolls(Clock::now());
  const std::vector<Response> responses = coordinator_->take_responses();
  if (!responses.empty()) {
    if (const auto late = live_.steps.lateness().take_line()) {
      log(LogLevel::kWarning, rank_, late->text);
      live_.events.add("late", late->rank, "", late->text);
    }
    HVDLITE_RETURN_IF_ERROR(accept(distribute(responses), rounds));
  }
  if (rounds.empty()) return Status();
  // The members must have all of it before this rank enters the first of these collectives: in
  // there it moves frames of several process sets only, and they could not follow.
  return flush_answers();
}

Status Negotiator::flush_answers() {
  const auto flushed = [&] { return control_.flush(); };
  const auto never_fails = [] { return Status(); };
  Status status;
  std::size_t left = 0;
  do {
    left = control_.unsent();
    status = waiter_.wait(flushed, never_fails, Deadline::after_knob(patience_));
    // A slow link is not a peer that does not read.
  } while (status.code() == StatusCode::kTimeout && control_.unsent() < left);
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
  const bool same_for_all = coordinator_->books().size() == 1 &&
                            std::none_of(responses.begin(), responses.end(), [](const auto& one) {
                              return one.request.kind == Kind::kAlltoall || one.request.is_send() ||
                                     !one.recipients.empty();
                            });
  const Bytes frame = same_for_all ? encode_respond(responses) : Bytes();
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    if (same_for_all) {
      control_.send(rank, frame);
    } else if (const auto own = addressed_to(rank, responses, *coordinator_); !own.empty()) {
      control_.send(rank, encode_respond(own));
    }
  }
  counters_.messages_sent = control_.frames_sent();
  return same_for_all ? responses : addressed_to(rank_, responses, *coordinator_);
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
  if (response.form == Response::Form::kCached) request = cache_.at(response.cache_id);
  const std::string key = request == nullptr ? "" : request->key();
  const auto found = pending_.find(key);
  EntryPtr entry = found == pending_.end() ? nullptr : found->second;
  const bool sticky = response.form == Response::Form::kError && response.error.sticky();
  if (sticky && elastic_) return response.error;  // the entry is parked with all others
  if (entry != nullptr) {
    pending_.erase(found);
    reported_ = {};
  }
  const bool late = std::binary_search(response.late.begin(), response.late.end(), rank_);
  if (response.form == Response::Form::kError) {
    if (late && entry == nullptr) late_.answer_error(key, response.error);
    if (entry != nullptr) accept_error(entry, response.error);
    return sticky ? response.error : Status();
  }
  if (response.form == Response::Form::kFull) {
    cache_.remember(response.cache_id, key, response.request);
  }
  const std::vector<int>& absent = response.absent;
  const bool joined = std::binary_search(absent.begin(), absent.end(), rank_);
  if (joined && entry == nullptr) return Status();
  if (late && request != nullptr && request->roll) {
    Result<EntryPtr> proxy = late_.answer_late(*request, response.late, std::move(entry));
    HVDLITE_RETURN_IF_ERROR(proxy.status());
    entry = std::move(proxy.value());
  } else if (entry != nullptr && entry->request.roll) {
    late_.answer(*entry, response.late);
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
    cache_.forget(entry->removes);
    late_.forget(entry->removes);
  }
  if (request->kind == Kind::kJoin) late_.clear();
  round.entries.push_back({std::move(entry), response.first_dimensions, absent, response.generation,
                           response.set_id, response.last_joined});
  return Status();
}

void Negotiator::accept_error(const EntryPtr& entry, const Status& error) {
  if (entry->request.kind == Kind::kRemoveProcessSet) queue_.reopen(entry->removes);
  queue_.finish(entry, error);
}

bool Negotiator::awaited() const {
  if (!coordinator_ || coordinator_->for_all_ranks()) return false;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && !left_[rank] && !control_.ended(rank)) return true;
  }
  return false;
}

Deadline Negotiator::wake_at() const {
  if (!coordinator_ || coordinator_->idle()) return Deadline::never();
  auto at = next_stall_check_;
  if (const auto due = coordinator_->rolls_due()) at = std::min(at, *due);
  if (const auto due = deadlocks_->due()) at = std::min(at, *due);
  return Deadline::after(at - Clock::now());
}

void Negotiator::send_all(const Bytes& frame, Deadline deadline) {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) control_.send(rank, frame);
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

std::vector<EntryPtr> Negotiator::take_pending() {
  std::vector<EntryPtr> entries;
  for (auto& [key, entry] : pending_) entries.push_back(std::move(entry));
  pending_.clear();
  for (Round& round : served_) {
    for (Agreed& agreed : round.entries) entries.push_back(std::move(agreed.entry));
  }
  served_.clear();
  return entries;
}

}  // namespace hvdlite
