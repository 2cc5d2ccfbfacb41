#include "engine/negotiator.h"

#include <algorithm>
#include <utility>

#include "engine/features.h"

namespace hvdlite {
namespace {

using Clock = std::chrono::steady_clock;

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

}  // namespace

Negotiator::Negotiator(EngineParts& parts, bool elastic)
    : rank_(parts.rank),
      size_(parts.size),
      elastic_(elastic),
      sets_(parts.sets),
      queue_(parts.queue),
      counters_(parts.counters),
      live_(parts.live),
      extensions_(parts.extensions),
      waiter_(*parts.fabric->waiter),
      patience_(parts.config.collective_timeout),
      control_(*parts.fabric),
      cache_(cache_capacity(parts.config)),
      answers_(parts.config),
      left_(size_) {
  if (rank_ != kCoordinatorRank) return;
  coordinator_ =
      std::make_unique<Coordinator>(size_, cache_capacity(parts.config), &parts.timeline, elastic);
  coordinator_->add_set(*sets_.get(0));
  for (const GroupPtr& set : sets_.others()) coordinator_->add_set(*set);
  coordinator_->skip_ids(static_cast<std::uint32_t>(sets_.highest()));
  features_ = add_features(*coordinator_, parts);
}

void Negotiator::submit(const std::vector<EntryPtr>& entries) {
  Submit message;
  if (!coordinator_ && pending_.empty() && !entries.empty()) {
    answers_.begin(LiveFigures::time_of(entries.front()->submitted_at));
  }
  for (const EntryPtr& entry : entries) {
    RankExtension* const decider = extensions_.decider_of(entry->request);
    if (decider == nullptr || !decider->take(entry)) pending_[entry->key] = entry;
    const auto id = cache_.find(entry->key, entry->request);
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
    control_.send(kCoordinatorRank, encode_submit(message));
  }
  counters_.messages_sent = control_.frames_sent();
}

void Negotiator::report() {
  const std::uint64_t count = counters_.cache_hits.get() + counters_.full_requests.get();
  const bool quiet = served_.empty() && unhandled_.empty();
  const auto body = extensions_.reporter()->report({pending_, count, quiet});
  if (!body) return;
  if (coordinator_) {
    (void)coordinator_->reported(rank_, *body, Clock::now());  // Its own report can be read.
  } else {
    control_.send(kCoordinatorRank, encode_report(*body));
    counters_.messages_sent = control_.frames_sent();
  }
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
    control_.send(frame.from, encode_respond({}));
    counters_.messages_sent = control_.frames_sent();
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
  if (response.form == Response::Form::kCached) request = cache_.at(response.cache_id);
  const std::string key = request == nullptr ? "" : request->key();
  const auto found = pending_.find(key);
  EntryPtr entry = found == pending_.end() ? nullptr : found->second;
  const bool sticky = response.form == Response::Form::kError && response.error.sticky();
  if (sticky && elastic_) return response.error;  // the entry is suspended with all others
  if (entry != nullptr) pending_.erase(found);
  const std::vector<int>& out = response.left_out;
  const bool left_out = std::binary_search(out.begin(), out.end(), rank_);
  if (response.form == Response::Form::kError) {
    RankExtension* const decider = left_out && entry == nullptr ? extensions_.decider() : nullptr;
    if (decider != nullptr) decider->failed_without(key, response.error);
    if (entry != nullptr) accept_error(entry, response.error);
    return sticky ? response.error : Status();
  }
  if (response.form == Response::Form::kFull) {
    cache_.remember(response.cache_id, key, response.request);
  }
  const std::vector<int>& absent = response.absent;
  const bool joined = std::binary_search(absent.begin(), absent.end(), rank_);
  if (joined && entry == nullptr) return Status();
  RankExtension* const decider = request == nullptr ? nullptr : extensions_.decider_of(*request);
  if (decider != nullptr && left_out) {
    Result<EntryPtr> other = decider->answered_without(*request, out, std::move(entry));
    HVDLITE_RETURN_IF_ERROR(other.status());
    entry = std::move(other.value());
  } else if (entry != nullptr) {
    RankExtension* const own = extensions_.decider_of(entry->request);
    if (own != nullptr) own->answered(*entry, out);
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
    extensions_.forget(entry->removes);
  }
  if (request->kind == Kind::kJoin) extensions_.all_joined();
  round.entries.push_back({std::move(entry), response.first_dimensions, absent, response.generation,
                           response.set_id, response.last_joined});
  return Status();
}

void Negotiator::accept_error(const EntryPtr& entry, const Status& error) {
  if (entry->request.kind == Kind::kRemoveProcessSet) queue_.reopen(entry->removes);
  queue_.finish(entry, error);
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
  const auto due = coordinator_->due();
  return due ? Deadline::after(*due - Clock::now()) : Deadline::never();
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
