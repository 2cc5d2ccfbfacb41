// The negotiator's part in the ends of ranks: what their going means for this rank, the root cause
// where several tell one, and the last words of this rank itself.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "engine/negotiator.h"

namespace hvdlite {
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

}  // namespace hvdlite
