// The negotiator's part in frozen schedules (negotiation/frozen_schedule.h): its entries wait in
// slots of the schedule, and rounds come from votes. The coordinator, on rank 0, says when a
// schedule begins; its end is nobody's decision, but the lowest vote.
#include <algorithm>
#include <limits>
#include <unordered_set>
#include <utility>

#include "base/log.h"
#include "engine/negotiator.h"

namespace hvdlite {
namespace {

using Clock = std::chrono::steady_clock;

// So long the votes of other ranks may take. The coordinator knows what is wrong with ranks that
// take longer: it warns of stalls, and proves deadlocks.
constexpr auto kLongestVote = std::chrono::milliseconds(250);
// So long something may wait that is in the schedule, but not yet its turn.
constexpr auto kLongestGap = std::chrono::milliseconds(10);
// Who does not know exactly which rank is silent lets those speak first who do.
constexpr double kVagueFactor = 1.25;
constexpr std::size_t kRanksShown = 8;  // in a message

// FNV-1a.
std::uint64_t check_of(const Freeze& freeze) {
  std::uint64_t check = 0xcbf29ce484222325;
  const auto add = [&](std::uint32_t number) { check = (check ^ number) * 0x100000001b3; };
  add(freeze.epoch);
  add(freeze.generation);
  for (const std::uint32_t id : freeze.ids) add(id);
  return check;
}

bool can_repeat(const Response& response) {
  const Request& request = response.request;
  return response.form == Response::Form::kCached && request.process_set == 0 &&
         !request.is_send() && response.absent.empty() && response.late.empty();
}

// Entries in the order in which the program submitted them.
void sort_by_order(std::vector<EntryPtr>& entries) {
  std::sort(entries.begin(), entries.end(),
            [](const EntryPtr& a, const EntryPtr& b) { return a->order < b->order; });
}

}  // namespace

void Negotiator::freeze_what_repeats(std::vector<Response>& responses) {
  for (const Response& response : responses) {
    if (can_repeat(response)) {
      cycles_.note(response.cache_id);
    } else {
      cycles_.reset();
    }
  }
  if (!may_freeze_ || timeline_.on() || !cycles_.ready() || !coordinator_->can_freeze()) return;
  coordinator_->freeze(cycles_.schedule());
  cycles_.reset();
  for (Response& response : coordinator_->take_responses()) {
    responses.push_back(std::move(response));
  }
}

Status Negotiator::begin_frozen(const Freeze& freeze) {
  const std::unordered_set<std::uint32_t> different(freeze.ids.begin(), freeze.ids.end());
  const bool known = std::all_of(freeze.ids.begin(), freeze.ids.end(),
                                 [&](std::uint32_t id) { return cache_.at(id) != nullptr; });
  if (schedule_.on() || !known || freeze.ids.empty() || different.size() != freeze.ids.size()) {
    return Status(StatusCode::kInternal, "rank 0 has frozen a schedule that cannot be run");
  }
  schedule_.begin(freeze.ids);
  epoch_ = freeze.epoch;
  generation_ = freeze.generation;
  check_ = check_of(freeze);
  held_.assign(freeze.ids.size(), nullptr);
  reported_ = {};
  std::vector<EntryPtr> entries;
  for (auto& [key, entry] : pending_) entries.push_back(std::move(entry));
  pending_.clear();
  sort_by_order(entries);
  const bool complete =
      std::none_of(left_.begin(), left_.end(), [](const auto& one) { return one.has_value(); });
  if (thawed_epoch_ >= epoch_ || !complete) schedule_.thaw();
  if (leaving_ || !waits_.empty()) want_thaw();
  admit(entries);
  return Status();
}

void Negotiator::leave_frozen() {
  leaving_ = true;
  if (schedule_.on()) want_thaw();
}

void Negotiator::admit(const std::vector<EntryPtr>& entries) {
  if (!waits_for_votes() && !entries.empty()) {
    progress_ = Clock::now();
    warned_ = false;
  }
  for (const EntryPtr& entry : entries) {
    const auto id = cache_.find(entry->key, entry->request);
    const auto slot = id ? schedule_.slot_of(*id) : std::nullopt;
    if (!slot) {
      pending_[entry->key] = entry;
      want_thaw();
      continue;
    }
    ++counters_.cache_hits;
    held_[*slot] = entry;
    ++held_count_;
    (void)schedule_.admit(*id);
  }
}

void Negotiator::cast_vote() {
  if (!schedule_.on()) return;
  if (coordinator_ && timeline_.on()) want_thaw();  // it shows what the coordinator does
  if (!schedule_.can_vote()) return;
  const std::uint64_t position = schedule_.position();
  Vote vote{schedule_.round(), schedule_.vote(), check_, {}};
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  for (std::uint64_t at = position; at < vote.until; ++at) {
    const Entry& entry = *held_[schedule_.slot_at(at)];
    if (!entry.request.of_a_step()) continue;
    first = std::min(first, entry.began_at + live_.clock_offset);
    vote.stamps = {first, std::max(vote.stamps.last, entry.submitted_at + live_.clock_offset)};
  }
  ballot_.cast(vote, position);
}

Status Negotiator::run_frozen(std::vector<Round>& rounds) {
  const auto now = Clock::now();
  // What waited while a round ran has not waited for votes.
  if (std::exchange(ran_round_, false)) progress_ = now;
  cast_vote();
  HVDLITE_RETURN_IF_ERROR(look_at_votes(now));
  cast_vote();
  if (!schedule_.voted() || !ballot_.count()) return Status();
  const Result<std::uint64_t> lowest = ballot_.lowest();
  HVDLITE_RETURN_IF_ERROR(lowest.status());
  const Ran ran{
      schedule_.position(), schedule_.ids().size(),
      schedule_.ids()[schedule_.slot_at(schedule_.position() + schedule_.ids().size() - 1)]};
  const std::vector<std::uint32_t> slots = schedule_.decide(lowest.value());
  if (slots.empty()) {
    thaw(ran);
  } else {
    rounds.push_back(take_round(slots));
  }
  return Status();
}

Round Negotiator::take_round(const std::vector<std::uint32_t>& slots) {
  Round round;
  for (const std::uint32_t slot : slots) {
    round.entries.push_back({std::exchange(held_[slot], nullptr), {}, {}, generation_});
    --held_count_;
  }
  void_report();
  ++counters_.frozen_rounds;
  progress_ = last_round_ = Clock::now();
  warned_ = false;
  ran_round_ = true;
  if (coordinator_) {
    tell_steps(round);
    say_who_is_late();
  }
  return round;
}

void Negotiator::tell_steps(const Round& round) {
  arrivals_.clear();
  for (int rank = 0; rank < size_; ++rank) {
    const Stamps& stamps = ballot_.stamps(rank);
    arrivals_.push_back(stamps.last == 0 ? Arrival() : live_.arrival(stamps, progress_));
  }
  for (const Agreed& agreed : round.entries) {
    const Entry& entry = *agreed.entry;
    if (!entry.request.of_a_step()) continue;
    arrivals_[rank_] = LiveFigures::own(entry);
    live_.steps.arrived(entry.request.name, arrivals_, /*counted=*/true);
  }
}

void Negotiator::want_thaw() {
  if (schedule_.thaws()) return;
  schedule_.thaw();
  tell_thaw(epoch_);
}

void Negotiator::tell_thaw(std::uint32_t epoch) {
  const Bytes frame = encode_thaw(epoch);
  if (coordinator_) {
    thawed_epoch_ = epoch;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) control_.send(rank, frame);
    }
  } else {
    control_.send(kCoordinatorRank, frame);
  }
  counters_.messages_sent = control_.frames_sent();
}

bool Negotiator::hear_thaw(const Frame& frame) {
  std::uint32_t epoch = 0;
  if (!decode_thaw(frame.body, epoch)) return false;
  if (coordinator_ ? epoch > coordinator_->epoch() : frame.from != kCoordinatorRank) return false;
  if (epoch <= thawed_epoch_) return true;
  thawed_epoch_ = epoch;
  if (coordinator_) tell_thaw(epoch);
  // Otherwise it has thawed here already, or is still to come.
  if (schedule_.on() && epoch == epoch_) schedule_.thaw();
  return true;
}

void Negotiator::thaw(const Ran& ran) {
  ++counters_.thaws;
  if (coordinator_) {
    cycles_.thawed(ran.positions / ran.cycle);
    if (ran.positions > 0) coordinator_->note_thaw(cache_.at(ran.last)->name, last_round_);
  }
  std::vector<EntryPtr> entries;
  for (EntryPtr& entry : held_) {
    if (entry != nullptr) entries.push_back(std::move(entry));
  }
  for (auto& [key, entry] : pending_) entries.push_back(std::move(entry));
  held_.clear();
  held_count_ = 0;
  pending_.clear();
  sort_by_order(entries);
  send(entries);
  if (!waits_.empty()) report_blocked(std::exchange(waits_, {}));
}

Patience Negotiator::vote_patience() const {
  if (!schedule_.voted()) return kLongestGap;
  // Warnings and errors of what stalls come from the coordinator.
  Patience patience = kLongestVote;
  for (const double seconds : {stall_warning_, answers_.limit()}) {
    if (seconds > 0) patience = std::min<Patience>(patience, delay_of(seconds / 4));
  }
  return patience;
}

Status Negotiator::look_at_votes(Coordinator::TimePoint now) {
  if (!waits_for_votes()) return Status();
  const Patience waited = now - progress_;
  if (waited <= vote_patience()) return Status();
  want_thaw();
  if (!schedule_.voted() || ballot_.count()) return Status();
  const Ballot::Missing ranks = silent();
  const double factor = ranks.some ? kVagueFactor : 1;
  const bool fails = answers_.limit() > 0 && waited > delay_of(factor * answers_.limit());
  const bool warns = !warned_ && stall_warning_ > 0 && waited > delay_of(factor * stall_warning_);
  if (!fails && !warns) return Status();
  warned_ = true;
  const std::string text = describe_silence(ranks);
  const int rank = ranks.some || ranks.ranks.empty() ? -1 : ranks.ranks.front();
  if (fails) return Status(answers_.given_up(), text, rank);
  log(LogLevel::kWarning, rank_, text);
  live_.events.add("stall", rank, waiting_request().name, text);
  return Status();
}

Ballot::Missing Negotiator::silent() const {
  if (!coordinator_ && thawed_epoch_ < epoch_) return {{kCoordinatorRank}};
  return ballot_.missing();
}

const Request& Negotiator::waiting_request() const {
  const auto held = std::find_if(held_.begin(), held_.end(), [](auto& one) { return one; });
  return held == held_.end() ? pending_.begin()->second->request : (*held)->request;
}

std::string Negotiator::describe_silence(const Ballot::Missing& silent) const {
  std::string names;
  const std::size_t count = silent.ranks.size();
  for (std::size_t i = 0; i < std::min(count, kRanksShown); ++i) {
    names += (i == 0 ? "" : ", ") + std::to_string(silent.ranks[i]);
  }
  if (count > kRanksShown) names += " and " + std::to_string(count - kRanksShown) + " more";
  return describe(waiting_request()) + " waits for " + (silent.some ? "one of " : "") +
         (count == 1 ? "rank " : "ranks ") + names +
         ", whose engine does not answer (stopped, or busy in a callback?)";
}

std::vector<Stall> Negotiator::frozen_stalls() const {
  if (!schedule_.on() || !schedule_.voted() || !waits_for_votes()) return {};
  // After that time the schedule has thawed, unless some engine does not answer.
  if (Clock::now() - progress_ < Stalls::kShortest) return {};
  std::vector<int> missing = ballot_.missing().ranks;
  std::vector<int> submitted;
  for (int rank = 0; rank < size_; ++rank) {
    if (!std::binary_search(missing.begin(), missing.end(), rank)) submitted.push_back(rank);
  }
  return {{waiting_request().name, progress_, std::move(submitted), std::move(missing)}};
}

Deadline Negotiator::frozen_wake_at() const {
  if (!waits_for_votes()) return Deadline::never();
  const Patience waited = Clock::now() - progress_;
  Patience at = Patience::max();
  if (!schedule_.thaws()) at = vote_patience();
  if (coordinator_ && waited <= Stalls::kShortest) at = std::min<Patience>(at, Stalls::kShortest);
  for (const double seconds : {warned_ ? 0 : stall_warning_, answers_.limit()}) {
    if (seconds <= 0) continue;
    const Patience patience = delay_of(seconds);
    at = std::min(at, waited <= patience ? patience : delay_of(kVagueFactor * seconds));
  }
  if (at == Patience::max()) return Deadline::never();
  // A little later than that, so that it has surely passed.
  return Deadline::after(at + std::chrono::milliseconds(1) - waited);
}

}  // namespace hvdlite
