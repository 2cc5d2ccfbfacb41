// The negotiator of rank 0: what it answers to the other ranks, and to its own; and what a leader
// of a control tree passes on meanwhile.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "engine/negotiator.h"

namespace hvdlite {
namespace {

using Clock = std::chrono::steady_clock;

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
  return !coordinator_->for_all_ranks() || coordinator_->decides() || coordinator_->joins();
}

void Negotiator::serve() {
  if (!coordinator_) {
    control_.poll();
    return;
  }
  const auto due = coordinator_->decision_due();
  const auto now = Clock::now();
  const bool is_due = due && now >= *due;
  if (!control_.poll() && !is_due) return;
  if (is_due) coordinator_->decide(now);
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

Status Negotiator::coordinate(std::vector<Round>& rounds) {
  const bool is_awaited = !rounds.empty();
  const std::vector<Response> responses = coordinator_->take_responses();
  log_notices();
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

void Negotiator::log_notices() {
  for (const Notice& notice : coordinator_->take_notices()) {
    log(LogLevel::kWarning, rank_, notice.text);
    live_.events.add(notice.event, notice.rank, notice.name, notice.text);
  }
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
      control_.send(rank, frame);
    } else if (const auto own = addressed_to(rank, responses, *coordinator_); !own.empty()) {
      control_.send(rank, encode_respond(own));
    }
  }
  (void)control_.flush();  // What others pass on is on its way before this rank sleeps.
  counters_.messages_sent = control_.frames_sent();
  return same_for_all ? responses : addressed_to(rank_, responses, *coordinator_);
}

}  // namespace hvdlite
