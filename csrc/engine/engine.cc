#include "engine/engine.h"

#include <utility>

#include "engine/entry.h"
#include "engine/lone_world.h"
#include "engine/peer_world.h"

namespace hvdlite {
namespace {

// The program's thread has waited since it submitted its last all-reduce of a step.
thread_local bool has_waited = false;

std::unique_ptr<World> make_world(EngineParts& parts, const PendingOperations* pending,
                                  Suspend suspend) {
  const auto settled = pending == nullptr ? std::nullopt : pending->settled();
  if (parts.fabric == nullptr)
    return std::make_unique<LoneWorld>(parts, settled, std::move(suspend));
  return std::make_unique<PeerWorld>(parts, settled, std::move(suspend));
}

}  // namespace

Engine::Engine(std::unique_ptr<Fabric> fabric, std::unique_ptr<Backend> backend, Config config,
               GpuLibraries gpu_libraries, std::unique_ptr<Trace> trace,
               const std::optional<Elastic>& elastic, std::int64_t clock_offset)
    : parts_(std::move(fabric), std::move(backend), std::move(config), std::move(gpu_libraries),
             std::move(trace), elastic ? &elastic->world : nullptr,
             elastic ? elastic->pending->highest_set() : 0, clock_offset),
      pending_(elastic ? elastic->pending : nullptr),
      world_(make_world(
          parts_, pending_.get(), pending_ == nullptr ? Suspend() : [this](Suspended suspended) {
            pending_->suspend(*this, std::move(suspended));
          })) {}

void Engine::note_wait() { has_waited = true; }

Engine::~Engine() {
  world_->shutdown();
  if (pending_ != nullptr) pending_->forget(*this);
}

void Engine::abort(const std::string& reason) {
  world_->abort(reason);
  if (pending_ != nullptr) pending_->close(*this, Status(StatusCode::kRankFailed, reason, rank()));
}

void Engine::shutdown() {
  world_->shutdown();
  if (pending_ == nullptr) return;
  pending_->close(*this, Status(StatusCode::kShutdown,
                                "hvdlite was shut down on rank " + std::to_string(rank()) +
                                    "; wait for all handles before shutdown()"));
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

Live Engine::live() {
  LiveFigures& figures = parts_.live;
  Live live;
  live.now = LiveFigures::Clock::now();
  live.began = figures.began;
  live.counters = counters();
  live.events = figures.events.take();
  live.dropped_events = figures.events.dropped();
  if (rank() == 0) live.steps = figures.steps.report();
  live.stalls = figures.stalls.get();
  return live;
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

}  // namespace hvdlite
