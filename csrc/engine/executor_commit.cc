// The commits of an elastic job, see commit_book.h.
#include <algorithm>
#include <chrono>

#include "engine/entry_check.h"
#include "engine/executor.h"
#include "host/peer_errors.h"

namespace hvdlite {
namespace {

// Between two looks at a device. Nothing rings when it has come to an event.
constexpr auto kDeviceInterval = std::chrono::microseconds(50);

}  // namespace

Status Executor::commit() {
  CommitBook& book = *parts_.commits;
  book.end_round();
  for (const std::uint32_t set : book.due_sets()) {
    const Group& group = book.group(set);
    HVDLITE_RETURN_IF_ERROR(await_device(book.due(set), group));
    HVDLITE_RETURN_IF_ERROR(
        parts_.backend->barrier(group, patience_of(parts_.config.collective_timeout)));
    for (const EntryPtr& entry : book.complete(set)) {
      if (entry->request.kind == Kind::kRemoveProcessSet) drop_set(entry->removes);
      buffers_.kept.release(*entry);
      parts_.queue.finish(entry, Status());
    }
  }
  return Status();
}

void Executor::drop_set(std::uint32_t set) {
  for (const EntryPtr& entry : parts_.commits->drop(set)) {
    buffers_.kept.release(*entry);
    parts_.queue.finish(
        entry, invalid_call(entry->request, "its process set was removed before transaction '" +
                                                entry->request.transaction + "' was committed"));
  }
}

Status Executor::await_device(const std::vector<EntryPtr>& entries, const Group& group) {
  const auto ready = [&] {
    return std::all_of(entries.begin(), entries.end(), [](const EntryPtr& entry) {
      const CudaEventPtr& end = entry->completion->on_device;
      return end == nullptr || end->reached();
    });
  };
  if (ready()) return Status();
  Waiter& waiter = *parts_.fabric->waiter;
  const auto failed = [&] {
    for (const int rank : group.ranks) {
      if (rank != parts_.rank && waiter.lost(rank)) return lost_peer(rank, "a commit");
    }
    return parts_.gpus.poll();
  };
  while (true) {
    const Status status = waiter.wait(ready, failed, Deadline::after(kDeviceInterval));
    if (status.code() != StatusCode::kTimeout || !status.message().empty()) return status;
  }
}

}  // namespace hvdlite
