#include "engine/engine.h"

#include <utility>

#include "base/log.h"
#include "engine/entry_check.h"

namespace hvdlite {
namespace {

constexpr auto kFirstSlice = std::chrono::microseconds(50);
// Between two looks at work that a GPU has under way: for errors only, nobody waits for them.
constexpr auto kGpuInterval = std::chrono::milliseconds(20);
constexpr auto kLongestSlice = std::chrono::milliseconds(2);

}  // namespace

Engine::Engine(std::unique_ptr<Fabric> fabric, std::unique_ptr<Backend> backend, Config config,
               GpuLibraries gpu_libraries, std::unique_ptr<Trace> trace)
    : rank_(fabric ? fabric->topology.rank : 0),
      size_(fabric ? fabric->topology.size : 1),
      config_(std::move(config)),
      trace_(std::move(trace)),
      fabric_(std::move(fabric)),
      backend_(std::move(backend)),
      gpus_(*backend_, fabric_.get(), config_, std::move(gpu_libraries)),
      sets_(size_),
      executor_(rank_, *backend_, gpus_, sets_, config_, queue_, counters_, timeline_),
      tunables_(tunables_of(config_)) {
  backend_->trace_to(*trace_);
  if (size_ == 1) return;
  negotiator_ =
      std::make_unique<Negotiator>(*fabric_, sets_, config_, queue_, counters_, timeline_);
  if (config_.autotune != 0 && rank_ == 0) {
    autotune_ = std::make_unique<Autotune>(config_, fabric_->topology.host_count() > 1,
                                           fabric_->own_segment->layout().slot_bytes);
  }
  thread_ = std::make_unique<Thread>("hvdlite-engine", [this] { background(); });
}

Engine::~Engine() { shutdown(); }

// Only local checks. The coordinator rejects differing or unknown ranks, so every rank gets the
// same error.
Status Engine::check_change(Entry& entry) const {
  Request& request = entry.request;
  if (request.kind == Kind::kRemoveProcessSet) {
    const GroupPtr group = sets_.get(entry.removes);
    if (group == nullptr || group->id == 0) {
      return invalid_call(request, group == nullptr ? "there is no such set, or no more"
                                                    : "the world itself stays");
    }
    request.ranks.assign(group->ranks.begin(), group->ranks.end());
  }
  if (size_ > 1) return Status();
  const auto text = describe_bad_ranks(request, size_);
  return invalid_call(request, text ? *text : "there is one of these ranks already, the world");
}

Status Engine::enqueue(EntryPtr entry, bool blocking) {
  const GroupPtr group = sets_.get(entry->request.process_set);
  HVDLITE_RETURN_IF_ERROR(check_entry(*entry, group, rank_, size_));
  if (entry->request.changes_process_sets()) HVDLITE_RETURN_IF_ERROR(check_change(*entry));
  entry->key = entry->request.key();
  if (entry->gpu) {
    Result<CudaEventPtr> ready =
        gpus_.mark(entry->request.process_set, entry->gpu->ordinal, entry->gpu->stream);
    if (!ready.ok()) return of_call(entry->request, ready.status());
    entry->gpu->ready = std::move(ready.value());
  }
  timeline_.submitted(*entry);
  if (size_ == 1) return run_alone(entry);
  HVDLITE_RETURN_IF_ERROR(queue_.push(std::move(entry)));
  if (!blocking) {
    token_.wake();
    fabric_->waiter->bell().ring();
  }
  return Status();
}

Status Engine::run_alone(const EntryPtr& entry) {
  // It may submit in turn: not before this one has let go of the lock.
  const auto then = entry->completion->take_continuation();
  HVDLITE_RETURN_IF_ERROR(execute_alone(entry));
  if (then) then();
  return Status();
}

Status Engine::execute_alone(const EntryPtr& entry) {
  MutexLock alone(alone_mutex_);
  HVDLITE_RETURN_IF_ERROR(queue_.push(entry));
  (void)queue_.take();
  std::vector<Agreed> round;
  round.push_back({entry, rows_given(entry->request, {true}), {}, 0, -1, rank_});
  timeline_.agreed(round);
  const Status status = executor_.run(round);
  if (round[0].entry != nullptr) queue_.finish(entry, status);  // it failed, or had no tensors
  return Status();
}

bool Engine::wait(const Entry& entry, bool blocking, Deadline deadline) {
  Completion& completion = *entry.completion;
  std::chrono::nanoseconds slice = kFirstSlice;
  while (!completion.done() && !deadline.passed()) {
    if (size_ > 1 && token_.try_take()) {
      drive(completion, deadline);
      const bool work_left = negotiator_->pending() > 0 || !queue_.empty();
      token_.release(work_left);
      slice = kLongestSlice;
    } else if (blocking && size_ > 1 && !ending()) {
      // The engine thread probably holds the token while asleep: ask for it.
      token_.request();
      fabric_->waiter->bell().ring();
      (void)completion.wait_until(deadline.earlier(Deadline::after(slice)));
      slice = std::min<std::chrono::nanoseconds>(2 * slice, kLongestSlice);
    } else {
      (void)completion.wait_until(deadline);
    }
  }
  return completion.done();
}

void Engine::drive(const Completion& completion, Deadline deadline) {
  while (!completion.done() && !deadline.passed() && !ending()) {
    if (!run_once() && !completion.done()) sleep(deadline, Sleeper::kForeground);
  }
}

void Engine::background() {
  while (token_.take_background()) {
    while (!ending() && !token_.requested()) {
      if (!run_once()) sleep(Deadline::never(), Sleeper::kBackground);
    }
    token_.release(/*work_left=*/ending());
  }
  drain();
  end_world();
  MutexLock lock(mutex_);
  stopped_ = true;
  stopped_changed_.notify_all();
}

void Engine::drain() {
  // Half of the time, so that the other half is left for telling the peers.
  const Deadline deadline = Deadline::after_knob(config_.shutdown_timeout / 2);
  const auto work_left = [&] {
    return negotiator_->pending() > 0 || !queue_.empty() || negotiator_->awaited();
  };
  while (!ending_.load() && !deadline.passed() && work_left()) {
    if (!run_once()) sleep(deadline, Sleeper::kLeaving);
  }
}

bool Engine::run_once() {
  const std::vector<EntryPtr> entries = queue_.take();
  if (!entries.empty()) negotiator_->submit(entries);
  std::vector<Round> rounds;
  if (Status status = negotiator_->receive(rounds); !status.ok()) request_end(std::move(status));
  run_rounds(rounds);
  look_at_gpus();
  return !entries.empty() || !rounds.empty() || ending_.load();
}

void Engine::run_rounds(std::vector<Round>& rounds) {
  if (rounds.empty()) return;
  const bool serves = negotiator_->serves();
  if (serves) fabric_->waiter->set_meanwhile([this] { negotiator_->serve(); });
  for (const Round& round : rounds) timeline_.agreed(round.entries);
  for (Round& round : rounds) {
    tune(round);
    Status status = this->status();
    if (status.ok()) {
      status = executor_.run(round.entries);
      if (!status.ok()) request_end(negotiator_->root_cause(std::move(status)));
    }
    for (const Agreed& agreed : round.entries) {
      if (agreed.entry != nullptr) fail(agreed.entry, this->status());
    }
    collectives_ += round.entries.size();
  }
  if (serves) fabric_->waiter->set_meanwhile(nullptr);
}

void Engine::tune(const Round& round) {
  if (round.tunables) {
    executor_.tune(*round.tunables);
    MutexLock lock(mutex_);
    tunables_ = *round.tunables;
  }
  if (autotune_ == nullptr) return;
  const auto wanted = autotune_->observe(round, std::chrono::steady_clock::now());
  if (wanted) negotiator_->tune(*wanted);
  if (autotune_->done()) autotune_.reset();
}

void Engine::look_at_gpus() {
  if (!(gpus_.busy() || timeline_.waits_for_devices()) || !next_gpu_look_.passed()) return;
  next_gpu_look_ = Deadline::after(kGpuInterval);
  timeline_.write_devices();
  if (Status status = gpus_.poll(); !status.ok()) {
    request_end(negotiator_->root_cause(std::move(status)));
  }
}

void Engine::sleep(Deadline deadline, Sleeper sleeper) {
  const auto ready = [&] {
    // Looked at here and nowhere before: shutdown() may come between the runner's last look and its
    // sleep.
    const bool ends = sleeper == Sleeper::kLeaving ? ending_.load() : ending();
    return ends || !queue_.empty() || negotiator_->poll() ||
           (sleeper == Sleeper::kBackground && token_.requested());
  };
  const auto never_fails = [] { return Status(); };
  const bool looks = gpus_.busy() || timeline_.waits_for_devices();
  const Deadline look = looks ? next_gpu_look_ : Deadline::never();
  (void)fabric_->waiter->wait(ready, never_fails,
                              deadline.earlier(negotiator_->wake_at()).earlier(look));
}

void Engine::end_world() {
  Status cause = status();
  const bool clean = cause.ok();
  autotune_.reset();
  if (clean) {
    cause = Status(StatusCode::kShutdown, "hvdlite was shut down on rank " + std::to_string(rank_));
  }
  std::vector<EntryPtr> entries = queue_.close(cause);
  for (EntryPtr& entry : negotiator_->take_pending()) entries.push_back(std::move(entry));
  if (clean) {
    negotiator_->announce_goodbye(collectives_);
    gpus_.close(Deadline::after_knob(config_.shutdown_timeout / 2));
  } else {
    negotiator_->announce_abort(cause);  // first: it says why NCCL's connections break
    gpus_.abort();
  }
  fabric_->close();
  for (const EntryPtr& entry : entries) fail(entry, cause);
}

void Engine::fail(const EntryPtr& entry, const Status& cause) {
  queue_.finish(entry, Status(cause.code(),
                              cause.message() + " [" + describe(entry->request) +
                                  " was in flight on rank " + std::to_string(rank_) + "]",
                              cause.failed_rank()));
}

void Engine::request_end(Status cause) {
  {
    MutexLock lock(mutex_);
    if (!sticky_.ok()) return;
    sticky_ = std::move(cause);
    ending_.store(true);
    log(LogLevel::kDebug, rank_, "the world ends: " + sticky_.message());
  }
  token_.close();
}

void Engine::abort(const std::string& reason) {
  if (size_ == 1) return;
  request_end(Status(StatusCode::kRankFailed, reason, rank_));
  fabric_->waiter->interrupt();
  stop_thread(Deadline::after_knob(config_.shutdown_timeout));
}

void Engine::shutdown() {
  if (size_ == 1) {
    (void)queue_.close(Status(StatusCode::kShutdown, "hvdlite was shut down"));
    return;
  }
  leaving_.store(true);
  token_.close();
  fabric_->waiter->bell().ring();
  stop_thread(Deadline::after_knob(config_.shutdown_timeout));
}

void Engine::stop_thread(Deadline patience) {
  {
    MutexLock lock(mutex_);
    while (!stopped_ && !patience.passed()) stopped_changed_.wait_until(mutex_, patience.when());
  }
  MutexLock joining(join_mutex_);
  if (thread_ == nullptr) return;
  request_end(Status(StatusCode::kShutdown,
                     "rank " + std::to_string(rank_) + " shut down during a collective", rank_));
  fabric_->waiter->interrupt();
  thread_.reset();  // joins
}

Status Engine::status() const {
  MutexLock lock(mutex_);
  return sticky_;
}

Counters Engine::counters() const { return counters_; }

Tunables Engine::tunables() const {
  MutexLock lock(mutex_);
  return tunables_;
}

}  // namespace hvdlite
