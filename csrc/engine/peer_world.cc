#include "engine/peer_world.h"

#include <algorithm>
#include <new>
#include <thread>
#include <utility>

#include "base/floating_point.h"
#include "base/log.h"

namespace hvdlite {
namespace {

constexpr auto kFirstSlice = std::chrono::microseconds(50);
// Between two looks at work that a GPU has under way: for errors only, nobody waits for them.
constexpr auto kGpuInterval = std::chrono::milliseconds(20);
// A caller's patience with a background that is about to give the token back, before it sleeps.
constexpr auto kAskTime = std::chrono::microseconds(20);
constexpr auto kLongestSlice = std::chrono::milliseconds(2);

std::string describe(const Tunables& tunables) {
  std::string text;
  for (const Tunable& one : kTunables) {
    text += (text.empty() ? "" : ", ") + std::string(one.name) + " " +
            std::to_string(tunables.*one.field);
  }
  return text;
}

}  // namespace

PeerWorld::PeerWorld(EngineParts& parts, const std::optional<Tunables>& settled, Suspend suspend)
    : parts_(parts),
      waiter_(*parts.fabric->waiter),
      suspend_(std::move(suspend)),
      negotiator_(parts, /*elastic=*/suspend_ != nullptr),
      executor_(parts),
      tunables_(tunables_of(parts.config)),
      settled_(settled) {
  if (settled && parts.rank == 0) negotiator_.tune(*settled, /*settled=*/true);
  watch_peers();
  if (parts.blocked) parts.blocked->set_wake_runner([this] { wake_runner(); });
  if (parts.rank == 0 && !settled && parts.config.autotune != 0) {
    autotune_ = std::make_unique<Autotune>(parts.config, parts.fabric->topology.host_count() > 1,
                                           parts.fabric->own_segment->layout().buffer_bytes);
  }
  thread_ = std::make_unique<Thread>("hvdlite-engine", [this] { background(); });
}

Status PeerWorld::submit(EntryPtr entry, bool blocking) {
  HVDLITE_RETURN_IF_ERROR(parts_.queue.push(std::move(entry)));
  if (!blocking) wake_runner();
  return Status();
}

bool PeerWorld::wait(const Entry& entry, bool blocking, Deadline deadline) {
  Completion& completion = *entry.completion;
  std::chrono::nanoseconds slice = kFirstSlice;
  while (!completion.done() && !deadline.passed()) {
    const bool asks = blocking && !ending();
    // Only once: the holder may be another caller, who waits for long.
    const auto patience = slice == kFirstSlice ? kAskTime : std::chrono::microseconds(0);
    if (take_turn(completion, asks, patience)) {
      drive(completion, deadline);
      give_back();
      slice = kLongestSlice;
    } else if (asks) {
      (void)completion.wait_until(deadline.earlier(Deadline::after(slice)));
      slice = std::min<std::chrono::nanoseconds>(2 * slice, kLongestSlice);
    } else {
      (void)completion.wait_until(deadline);
    }
  }
  return completion.done();
}

bool PeerWorld::take_turn(const Completion& completion, bool asks,
                          std::chrono::microseconds patience) {
  auto now = RunnerToken::Clock::now();
  const auto end = now + patience;
  while (!token_.try_take(now)) {
    if (!asks || completion.done()) return false;
    // The background runs the engine: it gives the token back between two rounds.
    token_.request();
    waiter_.wake_up().send();
    if (now >= end) return false;
    std::this_thread::yield();
    now = RunnerToken::Clock::now();
  }
  waiter_.disarm();
  return true;
}

void PeerWorld::give_back() {
  bool armed = false;
  if (token_.may_stand_by()) {
    waiter_.arm();
    armed = !has_work() && next_duty().is_never();
    if (!armed) waiter_.disarm();
  }
  const bool work_left = !armed && (negotiator_.pending() > 0 || !parts_.queue.empty());
  if (token_.release(work_left, armed)) waiter_.wake_sleeper();
}

void PeerWorld::wake_runner() {
  token_.wake();
  waiter_.wake_up().send();
}

void PeerWorld::drive(const Completion& completion, Deadline deadline) {
  const PlainFloatingPoint plain;
  while (!completion.done() && !deadline.passed() && !ending()) {
    if (!run_once() && !completion.done()) sleep(deadline, Sleeper::kForeground);
  }
}

void PeerWorld::background() {
  const PlainFloatingPoint plain;  // The thread has inherited the mode of the one that made it.
  while (token_.take_background()) {
    waiter_.disarm();
    bool runs = true;
    while (runs && !ending() && !token_.requested()) runs = run_once() || stand_by();
    if (runs) (void)token_.release(/*work_left=*/ending());
  }
  waiter_.disarm();
  drain();
  end_world();
  MutexLock lock(mutex_);
  stopped_ = true;
  stopped_changed_.notify_all();
}

bool PeerWorld::stand_by() {
  const auto ready = [&] { return has_work() || token_.requested(); };
  const bool awaits = negotiator_.pending() > 0;
  if (!waiter_.stand_by(ready, [&] { token_.stand_by(); }, awaits, next_look())) return true;
  if (token_.resume()) {
    waiter_.disarm();
    negotiator_.note_sleep();
    return true;
  }
  waiter_.wake_up().send();
  return false;
}

void PeerWorld::drain() {
  // Half of the time, so that the other half is left for telling the peers.
  const Deadline deadline = Deadline::after_knob(parts_.config.shutdown_timeout / 2);
  const auto work_left = [&] {
    return negotiator_.pending() > 0 || !parts_.queue.empty() || negotiator_.awaited();
  };
  while (!ending_.load() && !deadline.passed() && work_left()) {
    // The last goodbye may just have come, and nothing else wakes this thread.
    if (!run_once() && work_left()) sleep(deadline, Sleeper::kLeaving);
  }
}

template <typename Work>
bool PeerWorld::unless_out_of_memory(Work work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    running_ = nullptr;
    waiter_.set_meanwhile(nullptr);
    const std::string rank = std::to_string(parts_.rank);
    request_end(Status(StatusCode::kRankFailed,
                       "rank " + rank +
                           " has no memory left for the engine's own work; "
                           "use smaller batches, or fewer ranks per host",
                       parts_.rank));
    return true;
  }
}

bool PeerWorld::run_once() {
  return unless_out_of_memory([this] {
    taken_ = parts_.queue.take();
    if (!taken_.empty()) negotiator_.submit(taken_);
    negotiator_.report();
    if (Status status = negotiator_.receive(rounds_); !status.ok()) request_end(std::move(status));
    run_rounds();
    look_at_gpus();
    const bool worked = !taken_.empty() || !rounds_.empty();
    taken_.clear();
    rounds_.clear();
    return worked || ending_.load();
  });
}

void PeerWorld::run_rounds() {
  if (rounds_.empty()) return;
  const bool serves = negotiator_.serves();
  if (serves) waiter_.set_meanwhile([this] { negotiator_.serve(); });
  for (const Round& round : rounds_) parts_.timeline.agreed(round.entries);
  for (Round& round : rounds_) {
    tune(round);
    Status status = this->status();
    if (status.ok()) {
      running_ = &round;
      status = executor_.run(round.entries);
      running_ = nullptr;
      if (!status.ok()) request_end(negotiator_.root_cause(std::move(status)));
    }
    for (Agreed& agreed : round.entries) {
      if (agreed.entry == nullptr) continue;
      if (suspend_ != nullptr) {
        unfinished_.push_back(std::move(agreed.entry));
      } else {
        fail(agreed.entry, this->status());
      }
    }
    collectives_ += round.entries.size();
  }
  if (serves) waiter_.set_meanwhile(nullptr);
}

void PeerWorld::tune(const Round& round) {
  if (round.tunables) {
    executor_.tune(*round.tunables);
    MutexLock lock(mutex_);
    tunables_ = *round.tunables;
    if (round.settled) settled_ = tunables_;
    if (round.settled && parts_.rank == 0) {
      parts_.live.events.add("tuned", -1, "", "all ranks use " + describe(tunables_));
    }
  }
  if (autotune_ == nullptr) return;
  const auto wanted = autotune_->retune(round, std::chrono::steady_clock::now());
  if (wanted) negotiator_.tune(wanted->tunables, wanted->settled);
}

void PeerWorld::watch_peers() {
  if (parts_.config.stall_warning > 0) {
    parts_.fabric->silence_after = delay_of(parts_.config.stall_warning);
  }
  parts_.fabric->on_silence = [this](const SilentPeer& peer) {
    if (running_ == nullptr) return negotiator_.tell_of_silence(peer, nullptr);
    // The entries that have ended are null.
    const auto first = std::find_if(running_->entries.begin(), running_->entries.end(),
                                    [](const Agreed& agreed) { return agreed.entry != nullptr; });
    const bool commits = first == running_->entries.end();
    negotiator_.tell_of_silence(peer, commits ? nullptr : &first->entry->request);
  };
}

void PeerWorld::look_at_gpus() {
  if (!(parts_.gpus.busy() || parts_.timeline.waits_for_devices()) || !next_gpu_look_.passed())
    return;
  next_gpu_look_ = Deadline::after(kGpuInterval);
  parts_.timeline.write_devices();
  if (Status status = parts_.gpus.poll(); !status.ok()) {
    request_end(negotiator_.root_cause(std::move(status)));
  }
}

bool PeerWorld::has_work() {
  // ending() is asked here and not before: shutdown() may come between the runner's last look and
  // its sleep.
  return ending() || !parts_.queue.empty() ||
         unless_out_of_memory([this] { return negotiator_.poll(); });
}

Deadline PeerWorld::next_look() const { return next_duty().earlier(negotiator_.wake_at()); }

Deadline PeerWorld::next_duty() const {
  const bool looks = parts_.gpus.busy() || parts_.timeline.waits_for_devices();
  return negotiator_.must_wake_at().earlier(looks ? next_gpu_look_ : Deadline::never());
}

void PeerWorld::sleep(Deadline deadline, Sleeper sleeper) {
  const auto ready = [&] {
    if (sleeper == Sleeper::kForeground) return has_work();
    return ending_.load() || !parts_.queue.empty() ||
           unless_out_of_memory([this] { return negotiator_.poll(); });
  };
  const auto never_fails = [] { return Status(); };
  const Status status = waiter_.wait(ready, never_fails, deadline.earlier(next_look()));
  if (status.code() == StatusCode::kTimeout) negotiator_.note_sleep();
}

void PeerWorld::end_world() {
  Status cause = status();
  const bool clean = cause.ok();
  if (parts_.blocked) parts_.blocked->world_ended();
  if (autotune_ != nullptr) autotune_->world_ended();
  if (clean) {
    cause = Status(StatusCode::kShutdown,
                   "hvdlite was shut down on rank " + std::to_string(parts_.rank));
  }
  std::vector<EntryPtr> entries = parts_.queue.close(cause);
  for (EntryPtr& entry : negotiator_.take_pending()) entries.push_back(std::move(entry));
  if (clean) {
    negotiator_.announce_goodbye(collectives_);
    parts_.gpus.close(Deadline::after_knob(parts_.config.shutdown_timeout / 2));
  } else {
    negotiator_.announce_abort(cause);  // first: it says why NCCL's connections break
    parts_.gpus.abort();
  }
  parts_.fabric->close();
  for (EntryPtr& entry : unfinished_) entries.push_back(std::move(entry));
  add_interrupted(entries);
  if (suspend_ != nullptr && !clean && !leaving_.load() && !aborted_.load()) {
    suspend_({cause, std::move(entries), parts_.commits, parts_.sets.others(), !suspended_.load(),
              settled()});
    return;
  }
  if (parts_.commits != nullptr) {
    for (EntryPtr& entry : parts_.commits->take_rest()) entries.push_back(std::move(entry));
  }
  for (const EntryPtr& entry : entries) fail(entry, cause);
}

void PeerWorld::add_interrupted(std::vector<EntryPtr>& entries) {
  for (Round& round : rounds_) {
    for (Agreed& agreed : round.entries) taken_.push_back(std::move(agreed.entry));
  }
  for (EntryPtr& entry : taken_) {
    if (entry == nullptr || entry->completion->done()) continue;
    if (std::find(entries.begin(), entries.end(), entry) == entries.end()) {
      entries.push_back(std::move(entry));
    }
  }
}

void PeerWorld::fail(const EntryPtr& entry, const Status& cause) {
  parts_.queue.finish(
      entry, Status(cause.code(),
                    cause.message() + " [" + describe(entry->request) + " was in flight on rank " +
                        std::to_string(parts_.rank) + "]",
                    cause.failed_rank()));
}

void PeerWorld::request_end(Status cause) {
  {
    MutexLock lock(mutex_);
    if (!sticky_.ok()) return;
    sticky_ = std::move(cause);
    ending_.store(true);
    log(LogLevel::kDebug, parts_.rank, "the world ends: " + sticky_.message());
    if (!stopped_) parts_.live.events.add("error", sticky_.failed_rank(), "", sticky_.message());
  }
  token_.close();
}

void PeerWorld::abort(const std::string& reason) {
  aborted_.store(true);
  request_end(Status(StatusCode::kRankFailed, reason, parts_.rank));
  waiter_.interrupt();
  stop_thread(Deadline::after_knob(parts_.config.shutdown_timeout));
}

void PeerWorld::suspend(const std::string& reason) {
  suspended_.store(true);
  request_end(Status(StatusCode::kRankFailed, reason));
  waiter_.interrupt();
  stop_thread(Deadline::after_knob(parts_.config.shutdown_timeout));
}

void PeerWorld::shutdown() {
  leaving_.store(true);
  token_.close();
  waiter_.wake_up().send();
  stop_thread(Deadline::after_knob(parts_.config.shutdown_timeout));
}

void PeerWorld::stop_thread(Deadline patience) {
  {
    MutexLock lock(mutex_);
    while (!stopped_ && !patience.passed()) stopped_changed_.wait_until(mutex_, patience.when());
  }
  MutexLock joining(join_mutex_);
  if (thread_ == nullptr) return;
  request_end(Status(StatusCode::kShutdown,
                     "rank " + std::to_string(parts_.rank) + " shut down during a collective",
                     parts_.rank));
  waiter_.interrupt();
  thread_.reset();  // joins
}

Status PeerWorld::status() const {
  MutexLock lock(mutex_);
  return sticky_;
}

Tunables PeerWorld::tunables() const {
  MutexLock lock(mutex_);
  return tunables_;
}

std::optional<Tunables> PeerWorld::settled() const {
  MutexLock lock(mutex_);
  return settled_;
}

}  // namespace hvdlite
