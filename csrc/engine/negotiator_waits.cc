// The negotiator's part in what waits for long: whether rank 0 and peers in a collective still act.
#include "base/log.h"
#include "base/text.h"
#include "engine/negotiator.h"

namespace hvdlite {

Status Negotiator::look_at_rank_0() {
  if (!std::exchange(slept_, false) || !waits_for_rank_0()) return Status();
  const auto now = std::chrono::steady_clock::now();
  const AnswerWatch::Act act = answers_.look(now);
  if (act == AnswerWatch::Act::kNothing) return Status();
  if (act == AnswerWatch::Act::kAsk) {
    control_.send(kCoordinatorRank, encode_submit({}));
    counters_.messages_sent = control_.frames_sent();
    return Status();
  }
  const Request& request = pending_.begin()->second->request;
  const std::string text = describe(request) +
                           " waits for rank 0, whose engine does not answer "
                           "(stopped, or busy in a callback?)";
  if (act == AnswerWatch::Act::kFail) {
    return Status(answers_.given_up(), text, kCoordinatorRank);
  }
  log(LogLevel::kWarning, rank_, text);
  live_.events.add("stall", kCoordinatorRank, request.name, text);
  return Status();
}

void Negotiator::tell_of_silence(const SilentPeer& peer, const Request* request) {
  const double seconds = std::chrono::duration<double>(peer.waited).count();
  std::string text = (request == nullptr ? peer.operation : describe(*request)) + " has waited " +
                     text_of_fixed(seconds, 1) + " s for rank " + std::to_string(peer.rank) +
                     ", which has agreed to it, but " + peer.owes;
  if (coordinator_) {
    text += " (" + coordinator_->describe_last(peer.rank, std::chrono::steady_clock::now()) + ")";
  }
  text += "; is it suspended or overloaded, or its link down?";
  log(LogLevel::kWarning, rank_, text);
  live_.events.add("stall", peer.rank, request == nullptr ? "" : request->name, text);
}

}  // namespace hvdlite
