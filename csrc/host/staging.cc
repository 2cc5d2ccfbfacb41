#include "host/staging.h"

#include <algorithm>

#include "host/silence.h"

namespace hvdlite {
namespace {

// Room for 4 * 10^12 steps of a group; the rest of a number is the group's stamp.
constexpr int kStepBits = 42;
static_assert((std::uint64_t{kMaxGroupId} << kStepBits) >> kStepBits == kMaxGroupId);

// What a rank has not done whose counter is behind.
const char* owes_of(std::atomic<std::uint64_t> Lane::* counter) {
  if (counter == &Lane::arrived) return "has not brought its data";
  return counter == &Lane::reduced ? "has not reduced its share" : "has not read all data";
}

}  // namespace

Staging::Step Staging::begin(const Locals& locals, Patience patience, const char* operation) {
  std::uint64_t& last = numbers_[locals.group.lane];
  last = std::max(last, std::uint64_t{locals.group.stamp()} << kStepBits);
  const std::uint64_t number = ++last;
  return {&locals, number, static_cast<int>(number % kStagingBuffers), patience, operation};
}

Status Staging::reuse(const Step& step) {
  LastUse& last = last_use_[step.buffer];
  if (last.number > 0) {
    HVDLITE_RETURN_IF_ERROR(await(last.locals, &Lane::done, last.number, 0,
                                  static_cast<int>(last.locals.group.ranks.size()), step.patience,
                                  step.operation));
  }
  if (last.locals.group.id != step.locals->group.id || last.number == 0 ||
      last.locals.group.generation != step.locals->group.generation) {
    last.locals = *step.locals;
  }
  last.number = step.number;
  return Status();
}

std::vector<const void*> Staging::buffers(const Step& step, std::size_t offset) const {
  const int locals = static_cast<int>(step.locals->group.ranks.size());
  std::vector<const void*> addresses;
  addresses.reserve(static_cast<std::size_t>(locals));
  for (int i = 0; i < locals; ++i) addresses.push_back(buffer_of(step, i) + offset);
  return addresses;
}

void Staging::show(const Step& step, Place place) {
  Lane::Place& shown = fabric_.own_segment->lane(step.locals->group.lane).places[step.buffer];
  // publish() comes behind these.
  shown.begin.store(place.begin, std::memory_order_relaxed);
  shown.check.store(place.check, std::memory_order_relaxed);
}

Staging::Place Staging::place_of(const Step& step, int local_index) const {
  const Lane& lane = segment_of(*step.locals, local_index).lane(step.locals->group.lane);
  const Lane::Place& shown = lane.places[step.buffer];
  return {shown.begin.load(std::memory_order_relaxed), shown.check.load(std::memory_order_relaxed)};
}

void Staging::advance(const Step& step, Counter counter) {
  // Sequentially consistent: a sleeper publishes its flag, then looks at this counter.
  (fabric_.own_segment->lane(step.locals->group.lane).*counter).store(step.number);
  fabric_.ring_local(step.locals->group);
}

void Staging::publish(const Step& step) { advance(step, &Lane::arrived); }
void Staging::reduced(const Step& step) { advance(step, &Lane::reduced); }
void Staging::done(const Step& step) { advance(step, &Lane::done); }

Status Staging::await_published(const Step& step) {
  return await(*step.locals, &Lane::arrived, step.number, 0,
               static_cast<int>(step.locals->group.ranks.size()), step.patience, step.operation);
}

Status Staging::await_published(const Step& step, int local_index) {
  return await(*step.locals, &Lane::arrived, step.number, local_index, local_index + 1,
               step.patience, step.operation);
}

Status Staging::await_reduced(const Step& step, int drivers) {
  return await(*step.locals, &Lane::reduced, step.number, 0, drivers, step.patience,
               step.operation);
}

Status Staging::await_done(const Step& step) {
  return await(*step.locals, &Lane::done, step.number, 0,
               static_cast<int>(step.locals->group.ranks.size()), step.patience, step.operation);
}

Status Staging::await(const Locals& locals, Counter counter, std::uint64_t number, int first,
                      int last, Patience patience, const char* operation) {
  int missing = first;  // locals before it have reached the number
  const auto ready = [&] {
    for (; missing < last; ++missing) {
      const Lane& lane = segment_of(locals, missing).lane(locals.group.lane);
      if (missing != locals.index && (lane.*counter).load() < number) return false;
    }
    return true;
  };
  const auto failed = [&]() -> Status {
    for (int i = missing; i < last; ++i) {
      const int rank = locals.group.ranks[i];
      if (i == locals.index || !fabric_.waiter->lost(rank)) continue;
      if ((segment_of(locals, i).lane(locals.group.lane).*counter).load() >= number) continue;
      return lost_peer(rank, operation);
    }
    return Status();
  };
  if (ready()) return Status();
  const TraceSpan traced(trace_, trace_row_, "wait for ranks");
  Silence silence(fabric_, patience);
  while (true) {
    Status status = fabric_.waiter->wait(ready, failed, silence.next());
    if (status.code() != StatusCode::kTimeout) return status;
    const int rank = locals.group.ranks[missing];
    if (silence.gives_up(rank, operation, owes_of(counter))) return silent_peer(rank, operation);
  }
}

}  // namespace hvdlite
