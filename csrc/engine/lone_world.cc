#include "engine/lone_world.h"

#include <utility>

#include "base/floating_point.h"
#include "engine/entry.h"

namespace hvdlite {
namespace {

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

LoneWorld::LoneWorld(EngineParts& parts, std::optional<Tunables> settled, Suspend suspend)
    : parts_(parts), settled_(settled), suspend_(std::move(suspend)), executor_(parts) {}

Status LoneWorld::submit(EntryPtr entry, bool /*blocking*/) {
  HVDLITE_RETURN_IF_ERROR(check_alone(entry->request));
  // The continuation may submit in turn: not before this entry has released the mutex.
  std::function<void()> then;
  HVDLITE_RETURN_IF_ERROR(execute(entry, then));
  if (then) then();
  return Status();
}

Status LoneWorld::execute(const EntryPtr& entry, std::function<void()>& then) {
  MutexLock lock(mutex_);
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
  return Status();
}

bool LoneWorld::wait(const Entry& entry, bool /*blocking*/, Deadline deadline) {
  return entry.completion->wait_until(deadline);
}

void LoneWorld::shutdown() {
  (void)parts_.queue.close(Status(StatusCode::kShutdown, "hvdlite was shut down"));
}

void LoneWorld::suspend(const std::string& reason) {
  const Status cause(StatusCode::kRankFailed, reason);
  {
    MutexLock lock(mutex_);  // so no entry is half-way
    (void)parts_.queue.close(cause);
  }
  if (suspend_) suspend_({cause, {}, nullptr, parts_.sets.others(), /*by_itself=*/false, settled_});
}

Tunables LoneWorld::tunables() const { return tunables_of(parts_.config); }

}  // namespace hvdlite
