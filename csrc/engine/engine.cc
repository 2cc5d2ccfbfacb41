#include "engine/engine.h"

#include <algorithm>
#include <new>
#include <thread>
#include <utility>

#include "base/cpu.h"
#include "base/text.h"

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

// The program's thread has waited since it submitted its last all-reduce of a step.
thread_local bool has_waited = false;

// What the coordinator of a larger world refuses.
Status check_alone(const Request& request) {
  if (request.changes_process_sets()) {
    const auto text = describe_bad_ranks(request, 1);
    return invalid_call(request, text ? *text : "there is one of these ranks already, the world");
  }
  if (request.kind != Kind::kAlltoall && request.kind != Kind::kReducescatter) return Status();
  const auto text = describe_bad_splits(0, request, {true});
  return text ? Status(StatusCode::kInvalidArgument, *text, 0) : Status();
}

// This rank's request as the answer to itself.
Agreed agreed_alone(const EntryPtr& entry) {
  Agreed agreed;
  agreed.entry = entry;
  agreed.first_dimensions = rows_given(entry->request, {true});
  if (entry->request.kind == Kind::kJoin) agreed.last_joined = 0;
  return agreed;
}

}  // namespace

Engine::Engine(std::unique_ptr<Fabric> fabric, std::unique_ptr<Backend> backend, Config config,
               GpuLibraries gpu_libraries, std::unique_ptr<Trace> trace,
               const std::optional<Elastic>& elastic, std::int64_t clock_offset)
    : parts_(std::move(fabric), std::move(backend), std::move(config), std::move(gpu_libraries),
             std::move(trace), elastic ? &elastic->world : nullptr,
             elastic ? elastic->pending->highest_set() : 0, clock_offset),
      pending_(elastic ? elastic->pending : nullptr),
      executor_(parts_),
      tunables_(tunables_of(parts_.config)),
      settled_(pending_ == nullptr ? std::nullopt : pending_->settled()) {
  if (parts_.fabric == nullptr) return;
  waiter_ = parts_.fabric->waiter.get();
  negotiator_ = std::make_unique<Negotiator>(parts_, elastic.has_value());
  const auto found = settled();
  if (rank() == 0 && found) negotiator_->tune(*found, /*settled=*/true);
  if (rank() == 0 && !found && parts_.config.autotune != 0) {
    autotune_ = std::make_unique<Autotune>(parts_.config, parts_.fabric->topology.host_count() > 1,
                                           parts_.fabric->own_segment->layout().buffer_bytes);
  }
  watch_peers();
  thread_ = std::make_unique<Thread>("hvdlite-engine", [this] { background(); });
}

void Engine::note_wait() { has_waited = true; }

void Engine::note_blocked(std::vector<EntryPtr> waits, std::vector<std::string> places) {
  if (negotiator_ == nullptr) return;
  negotiator_->note_blocked(std::move(waits), std::move(places));
  wake_runner();
}

void Engine::with_present(const std::function<void(Engine&)>& call) {
  if (pending_ != nullptr) {
    pending_->with_present(call);
  } else {
    call(*this);
  }
}

Status Engine::enqueue(const EntryPtr& entry, bool blocking) {
  HVDLITE_RETURN_IF_ERROR(check(*entry));
  Status status = submit(entry, blocking);
  const bool ended = status.sticky() && status.code() != StatusCode::kShutdown;
  return ended && pending_ != nullptr ? pending_->admit(*this, entry) : status;
}

Status Engine::submit(const EntryPtr& entry, bool blocking) {
  if (parts_.fabric == nullptr) return run_alone(entry);
  HVDLITE_RETURN_IF_ERROR(parts_.queue.push(entry));
  if (!blocking) wake_runner();
  return Status();
}

// Only local checks. The world rejects ranks that differ or are unknown, so every rank gets the
// same error.
Status Engine::check(Entry& entry) {
  const Request& request = entry.request;
  const GroupPtr group = process_set(request.process_set);
  if (group == nullptr && pending_ != nullptr &&
      request.process_set <= static_cast<std::uint32_t>(highest_set())) {
    // As for an operation that was in flight: the ranks restore their last commit.
    return of_call(request, Status(StatusCode::kRankFailed,
                                   "process set " + std::to_string(request.process_set) +
                                       " has lost a member in this elastic job, or was removed"));
  }
  HVDLITE_RETURN_IF_ERROR(check_entry(entry, group, rank()));
  if (request.is_send() && elastic()) {
    return invalid_call(request,
                        "an elastic job takes no sends, which cannot be redone without the other "
                        "rank; use a broadcast, or start without --min-np and --max-np");
  }
  if (request.late) HVDLITE_RETURN_IF_ERROR(parts_.late.check(entry, *group, elastic()));
  if (entry.request.kind == Kind::kRemoveProcessSet) {
    HVDLITE_RETURN_IF_ERROR(name_removed_ranks(entry));
  }
  entry.key = entry.request.key();
  if (entry.gpu) HVDLITE_RETURN_IF_ERROR(mark_ready(entry));
  entry.began_at = entry.submitted_at = trace_now();
  if (entry.request.of_a_step()) {
    entry.after_wait = std::exchange(has_waited, false);
    const std::int64_t began = began_at_.exchange(0, std::memory_order_relaxed);
    if (began > 0) entry.began_at = began;
  }
  return Status();
}

Status Engine::name_removed_ranks(Entry& entry) const {
  const GroupPtr group = process_set(entry.removes);
  if (group == nullptr) return invalid_call(entry.request, "there is no such set, or no more");
  if (group->id == 0) return invalid_call(entry.request, "the world itself stays");
  entry.request.ranks.assign(group->ranks.begin(), group->ranks.end());
  return Status();
}

Status Engine::mark_ready(Entry& entry) {
  Result<CudaEventPtr> ready =
      parts_.gpus.mark(entry.request.process_set, entry.gpu->ordinal, entry.gpu->stream);
  if (!ready.ok()) return of_call(entry.request, ready.status());
  entry.gpu->ready = std::move(ready.value());
  return Status();
}

// The thread that submits a collective executes it, one thread at a time, and it is done when this
// returns. So nobody waits, nothing is in flight when the world ends, and no error ends it.
Status Engine::run_alone(const EntryPtr& entry) {
  HVDLITE_RETURN_IF_ERROR(check_alone(entry->request));
  // The continuation may submit in turn: not before this entry has released the mutex.
  std::function<void()> then;
  {
    MutexLock lock(alone_);
    HVDLITE_RETURN_IF_ERROR(parts_.queue.push(entry));
    then = entry->completion->take_continuation();
    (void)parts_.queue.take();
    std::vector<Agreed> round = {agreed_alone(entry)};
    parts_.timeline.agreed(round);
    if (entry->request.of_a_step()) {
      Arrival arrival = LiveFigures::own(*entry);
      arrival.after_wait = false;
      parts_.live.steps.arrived(entry->request.name, {&arrival, 1}, /*counted=*/false);
    }
    const PlainFloatingPoint plain;
    const Status status = executor_.run(round);
    if (round[0].entry != nullptr) parts_.queue.finish(entry, status);  // it failed
  }
  if (then) then();
  return Status();
}

bool Engine::wait(const Entry& entry, bool blocking, Deadline deadline) {
  Completion& completion = *entry.completion;
  if (parts_.fabric == nullptr) return completion.wait_until(deadline);
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

bool Engine::take_turn(const Completion& completion, bool asks,
                       std::chrono::microseconds patience) {
  auto now = RunnerToken::Clock::now();
  const auto end = now + patience;
  while (!token_.try_take(now)) {
    if (!asks || completion.done()) return false;
    // The background runs the engine: it gives the token back between two rounds.
    token_.request();
    waiter_->wake_up().send();
    if (now >= end) return false;
    std::this_thread::yield();
    now = RunnerToken::Clock::now();
  }
  waiter_->disarm();
  return true;
}

void Engine::give_back() {
  bool armed = false;
  if (token_.may_stand_by()) {
    waiter_->arm();
    armed = !has_work() && next_duty().is_never();
    if (!armed) waiter_->disarm();
  }
  const bool work_left = !armed && (negotiator_->pending() > 0 || !parts_.queue.empty());
  if (token_.release(work_left, armed)) waiter_->wake_sleeper();
}

void Engine::wake_runner() {
  token_.wake();
  waiter_->wake_up().send();
}

void Engine::drive(const Completion& completion, Deadline deadline) {
  const PlainFloatingPoint plain;
  while (!completion.done() && !deadline.passed() && !ending()) {
    if (!run_once() && !completion.done()) sleep(deadline, Sleeper::kForeground);
  }
}

void Engine::background() {
  const PlainFloatingPoint plain;  // The thread has inherited the mode of the one that made it.
  while (token_.take_background()) {
    waiter_->disarm();
    bool runs = true;
    while (runs && !ending() && !token_.requested()) runs = run_once() || stand_by();
    if (runs) (void)token_.release(/*work_left=*/ending());
  }
  waiter_->disarm();
  drain();
  end_world();
  MutexLock lock(mutex_);
  stopped_ = true;
  stopped_changed_.notify_all();
}

bool Engine::stand_by() {
  const auto ready = [&] { return has_work() || token_.requested(); };
  const bool awaits = negotiator_->pending() > 0;
  if (!waiter_->stand_by(ready, [&] { token_.stand_by(); }, awaits, next_look())) return true;
  if (token_.resume()) {
    waiter_->disarm();
    negotiator_->note_sleep();
    return true;
  }
  waiter_->wake_up().send();
  return false;
}

void Engine::drain() {
  // Half of the time, so that the other half is left for telling the peers.
  const Deadline deadline = Deadline::after_knob(parts_.config.shutdown_timeout / 2);
  const auto work_left = [&] {
    return negotiator_->pending() > 0 || !parts_.queue.empty() || negotiator_->awaited();
  };
  while (!ending_.load() && !deadline.passed() && work_left()) {
    // The last goodbye may just have come, and nothing else wakes this thread.
    if (!run_once() && work_left()) sleep(deadline, Sleeper::kLeaving);
  }
}

template <typename Work>
bool Engine::unless_out_of_memory(Work work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    running_ = nullptr;
    waiter_->set_meanwhile(nullptr);
    const std::string rank = std::to_string(parts_.rank);
    request_end(Status(StatusCode::kRankFailed,
                       "rank " + rank +
                           " has no memory left for the engine's own work; "
                           "use smaller batches, or fewer ranks per host",
                       parts_.rank));
    return true;
  }
}

bool Engine::run_once() {
  return unless_out_of_memory([this] {
    taken_ = parts_.queue.take();
    if (!taken_.empty()) negotiator_->submit(taken_);
    negotiator_->report();
    if (Status status = negotiator_->receive(rounds_); !status.ok()) request_end(std::move(status));
    run_rounds();
    look_at_gpus();
    const bool worked = !taken_.empty() || !rounds_.empty();
    taken_.clear();
    rounds_.clear();
    return worked || ending_.load();
  });
}

void Engine::run_rounds() {
  if (rounds_.empty()) return;
  const bool serves = negotiator_->serves();
  if (serves) waiter_->set_meanwhile([this] { negotiator_->serve(); });
  for (const Round& round : rounds_) parts_.timeline.agreed(round.entries);
  for (Round& round : rounds_) {
    tune(round);
    Status status = this->status();
    if (status.ok()) {
      running_ = &round;
      status = executor_.run(round.entries);
      running_ = nullptr;
      if (!status.ok()) request_end(negotiator_->root_cause(std::move(status)));
    }
    for (Agreed& agreed : round.entries) {
      if (agreed.entry == nullptr) continue;
      if (pending_ != nullptr) {
        unfinished_.push_back(std::move(agreed.entry));
      } else {
        fail(agreed.entry, this->status());
      }
    }
    collectives_ += round.entries.size();
  }
  if (serves) waiter_->set_meanwhile(nullptr);
}

void Engine::tune(const Round& round) {
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
  if (wanted) negotiator_->tune(wanted->tunables, wanted->settled);
}

void Engine::watch_peers() {
  if (parts_.config.stall_warning > 0) {
    parts_.fabric->silence_after = delay_of(parts_.config.stall_warning);
  }
  parts_.fabric->on_silence = [this](const SilentPeer& peer) {
    if (running_ == nullptr) return negotiator_->tell_of_silence(peer, nullptr);
    // The entries that have ended are null.
    const auto first = std::find_if(running_->entries.begin(), running_->entries.end(),
                                    [](const Agreed& agreed) { return agreed.entry != nullptr; });
    const bool commits = first == running_->entries.end();
    negotiator_->tell_of_silence(peer, commits ? nullptr : &first->entry->request);
  };
}

void Engine::look_at_gpus() {
  if (!(parts_.gpus.busy() || parts_.timeline.waits_for_devices()) || !next_gpu_look_.passed())
    return;
  next_gpu_look_ = Deadline::after(kGpuInterval);
  parts_.timeline.write_devices();
  if (Status status = parts_.gpus.poll(); !status.ok()) {
    request_end(negotiator_->root_cause(std::move(status)));
  }
}

bool Engine::has_work() {
  // ending() is asked here and not before: shutdown() may come between the runner's last look and
  // its sleep.
  return ending() || !parts_.queue.empty() ||
         unless_out_of_memory([this] { return negotiator_->poll(); });
}

Deadline Engine::next_look() const { return next_duty().earlier(negotiator_->wake_at()); }

Deadline Engine::next_duty() const {
  const bool looks = parts_.gpus.busy() || parts_.timeline.waits_for_devices();
  return negotiator_->must_wake_at().earlier(looks ? next_gpu_look_ : Deadline::never());
}

void Engine::sleep(Deadline deadline, Sleeper sleeper) {
  const auto ready = [&] {
    if (sleeper == Sleeper::kForeground) return has_work();
    return ending_.load() || !parts_.queue.empty() ||
           unless_out_of_memory([this] { return negotiator_->poll(); });
  };
  const auto never_fails = [] { return Status(); };
  const Status status = waiter_->wait(ready, never_fails, deadline.earlier(next_look()));
  if (status.code() == StatusCode::kTimeout) negotiator_->note_sleep();
}

void Engine::end_world() {
  Status cause = status();
  const bool clean = cause.ok();
  if (autotune_ != nullptr) autotune_->world_ended();
  if (clean) {
    cause = Status(StatusCode::kShutdown,
                   "hvdlite was shut down on rank " + std::to_string(parts_.rank));
  }
  std::vector<EntryPtr> entries = parts_.queue.close(cause);
  for (EntryPtr& entry : negotiator_->take_pending()) entries.push_back(std::move(entry));
  if (clean) {
    negotiator_->announce_goodbye(collectives_);
    parts_.gpus.close(Deadline::after_knob(parts_.config.shutdown_timeout / 2));
  } else {
    negotiator_->announce_abort(cause);  // first: it says why NCCL's connections break
    parts_.gpus.abort();
  }
  parts_.fabric->close();
  for (EntryPtr& entry : unfinished_) entries.push_back(std::move(entry));
  add_interrupted(entries);
  if (pending_ != nullptr && !clean && !leaving_.load() && !aborted_.load()) {
    pending_->suspend(*this, {cause, std::move(entries), parts_.commits, parts_.sets.others(),
                              !suspended_.load(), settled()});
    return;
  }
  if (parts_.commits != nullptr) {
    for (EntryPtr& entry : parts_.commits->take_rest()) entries.push_back(std::move(entry));
  }
  for (const EntryPtr& entry : entries) fail(entry, cause);
}

void Engine::add_interrupted(std::vector<EntryPtr>& entries) {
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

void Engine::fail(const EntryPtr& entry, const Status& cause) {
  parts_.queue.finish(
      entry, Status(cause.code(),
                    cause.message() + " [" + describe(entry->request) + " was in flight on rank " +
                        std::to_string(parts_.rank) + "]",
                    cause.failed_rank()));
}

void Engine::request_end(Status cause) {
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

void Engine::stop_thread(Deadline patience) {
  {
    MutexLock lock(mutex_);
    while (!stopped_ && !patience.passed()) stopped_changed_.wait_until(mutex_, patience.when());
  }
  MutexLock joining(join_mutex_);
  if (thread_ == nullptr) return;
  request_end(Status(StatusCode::kShutdown,
                     "rank " + std::to_string(parts_.rank) + " shut down during a collective",
                     parts_.rank));
  waiter_->interrupt();
  thread_.reset();  // joins
}

Status Engine::status() const {
  MutexLock lock(mutex_);
  return sticky_;
}

Tunables Engine::tunables() const {
  MutexLock lock(mutex_);
  return tunables_;
}

std::optional<Tunables> Engine::settled() const {
  MutexLock lock(mutex_);
  return settled_;
}

Engine::~Engine() {
  leave();
  if (pending_ != nullptr) pending_->forget(*this);
}

void Engine::abort(const std::string& reason) {
  if (parts_.fabric != nullptr) {
    aborted_.store(true);
    stop(Status(StatusCode::kRankFailed, reason, rank()));
  }
  if (pending_ != nullptr) pending_->close(*this, Status(StatusCode::kRankFailed, reason, rank()));
}

void Engine::shutdown() {
  leave();
  if (pending_ == nullptr) return;
  pending_->close(*this, Status(StatusCode::kShutdown,
                                "hvdlite was shut down on rank " + std::to_string(rank()) +
                                    "; wait for all handles before shutdown()"));
}

void Engine::leave() {
  if (parts_.fabric == nullptr) {
    (void)parts_.queue.close(Status(StatusCode::kShutdown, "hvdlite was shut down"));
    return;
  }
  leaving_.store(true);
  token_.close();
  waiter_->wake_up().send();
  stop_thread(Deadline::after_knob(parts_.config.shutdown_timeout));
}

void Engine::suspend(const std::string& reason) {
  const Status cause(StatusCode::kRankFailed, reason);
  if (parts_.fabric != nullptr) {
    suspended_.store(true);
    return stop(cause);
  }
  {
    MutexLock lock(alone_);  // so no entry is half-way
    (void)parts_.queue.close(cause);
  }
  if (pending_ == nullptr) return;
  pending_->suspend(*this,
                    {cause, {}, nullptr, parts_.sets.others(), /*by_itself=*/false, settled()});
}

void Engine::stop(Status cause) {
  request_end(std::move(cause));
  waiter_->interrupt();
  stop_thread(Deadline::after_knob(parts_.config.shutdown_timeout));
}

Live Engine::live() {
  LiveFigures& figures = parts_.live;
  Live live;
  live.now = LiveFigures::Clock::now();
  live.began = figures.began;
  live.counters = counters();
  live.events = figures.events.take();
  if (rank() == 0) live.steps = figures.steps.report();
  live.stalls = figures.stalls.get();
  return live;
}

}  // namespace hvdlite
