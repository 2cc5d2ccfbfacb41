#include "engine/executor.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "engine/entry_check.h"

namespace hvdlite {

Status Executor::run(std::vector<Agreed>& round) {
  std::vector<std::size_t> left(round.size());
  for (std::size_t i = 0; i < round.size(); ++i) {
    left[i] = std::max<std::size_t>(round[i].entry->request.tensors.size(), 1);
  }
  for (Batch& batch : plan_batches(round, static_cast<std::uint64_t>(threshold_))) {
    // What failed with an earlier batch failed so on every member.
    std::erase_if(batch.tensors, [&](const TensorRef& ref) { return !round[ref.agreed].entry; });
    if (batch.tensors.empty()) continue;
    const Members& members = members_of(batch, round[batch.tensors[0].agreed]);
    BatchRun run(parts_, buffers_, batch, members, round);
    const Status opened = run.open();
    if (!opened.ok() && !opened.sticky()) {
      fail_batch(batch, round, opened);
      continue;
    }
    HVDLITE_RETURN_IF_ERROR(opened);
    if (parts_.commits != nullptr) HVDLITE_RETURN_IF_ERROR(run.keep_inputs());
    const auto begun = LiveFigures::Clock::now();
    HVDLITE_RETURN_IF_ERROR(run.execute());
    HVDLITE_RETURN_IF_ERROR(run.close());
    note_end(batch, round, begun);
    finish_batch(batch, members, round, left);
  }
  return parts_.commits == nullptr ? Status() : commit();
}

const Members& Executor::members_of(const Batch& batch, const Agreed& agreed) {
  const auto [at, is_new] = members_.try_emplace(batch.process_set);
  Members& members = at->second;
  if (!is_new && members.group.generation == batch.generation) return members;
  const Group& whole = *parts_.sets.get(batch.process_set);
  const std::vector<int>& absent = agreed.absent;
  members = {{whole.id, {}, whole.lane, batch.generation}, {}};
  for (const int rank : whole.ranks) {
    members.present.push_back(!std::binary_search(absent.begin(), absent.end(), rank));
    if (members.present.back()) members.group.ranks.push_back(rank);
  }
  if (parts_.config.average_over_joined != 0 && !absent.empty()) {
    members.group.average_over = static_cast<int>(whole.ranks.size());
  }
  return members;
}

void Executor::note_end(const Batch& batch, const std::vector<Agreed>& round,
                        LiveFigures::Clock::time_point begun) {
  if (batch.kind != Kind::kAllreduce) return;
  const auto counts = [&](const TensorRef& ref) {
    return round[ref.agreed].entry->request.of_a_step();
  };
  if (!std::any_of(batch.tensors.begin(), batch.tensors.end(), counts)) return;
  const auto now = LiveFigures::Clock::now();
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(now - begun);
  parts_.counters.exchange_us += static_cast<std::uint64_t>(took.count());
  if (parts_.rank == 0) parts_.live.steps.ended(now);
}

void Executor::finish_batch(const Batch& batch, const Members& members, std::vector<Agreed>& round,
                            std::vector<std::size_t>& left) {
  ++parts_.counters.batches;
  parts_.counters.bytes += batch.bytes;
  for (const TensorRef& ref : batch.tensors) {
    ++parts_.counters.tensors;
    if (--left[ref.agreed] > 0) continue;
    Agreed& agreed = round[ref.agreed];
    if (batch.kind == Kind::kRemoveProcessSet) {
      members_.erase(static_cast<std::uint32_t>(agreed.set_id));
    }
    agreed.entry->completion->members = members.group.divisor();
    agreed.entry->completion->epoch = parts_.epoch;
    if (parts_.commits != nullptr) {
      parts_.commits->hold(agreed.entry, members.group);
    } else {
      parts_.queue.finish(agreed.entry, Status());
    }
    agreed.entry = nullptr;
  }
}

void Executor::fail_batch(const Batch& batch, std::vector<Agreed>& round, const Status& why) {
  for (const TensorRef& ref : batch.tensors) {
    EntryPtr& entry = round[ref.agreed].entry;
    if (entry == nullptr) continue;
    parts_.queue.finish(entry, of_call(entry->request, why));
    entry = nullptr;
  }
}

}  // namespace hvdlite
