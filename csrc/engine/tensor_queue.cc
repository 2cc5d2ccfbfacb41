#include "engine/tensor_queue.h"

#include <utility>

#include "engine/entry.h"

namespace hvdlite {

Status TensorQueue::push(EntryPtr entry) {
  MutexLock lock(mutex_);
  if (!closed_.ok()) {
    return Status(
        closed_.code(),
        closed_.message() + " [" + describe(entry->request) + " was submitted afterwards]",
        closed_.failed_rank());
  }
  if (joining_) {
    return Status(
        StatusCode::kInvalidArgument,
        describe(entry->request) +
            ": this rank has called join() and gives nothing more until it returns; submit "
            "it before that call, or after it");
  }
  if (!removed_.empty() && removed_.contains(entry->request.process_set)) {
    return Status(StatusCode::kInvalidArgument,
                  describe(entry->request) + ": its process set was removed on this rank");
  }
  if (!in_flight_.insert(entry->key).second) return duplicate_name(entry->request);
  joining_ = entry->request.kind == Kind::kJoin;
  if (entry->request.kind == Kind::kRemoveProcessSet) removed_.insert(entry->removes);
  entry->order = pushed_++;
  entries_.push_back(std::move(entry));
  waiting_.store(true, std::memory_order_seq_cst);
  return Status();
}

void TensorQueue::reopen(std::uint32_t process_set) {
  MutexLock lock(mutex_);
  removed_.erase(process_set);
}

std::uint64_t TensorQueue::pushed() {
  MutexLock lock(mutex_);
  return pushed_;
}

std::vector<EntryPtr> TensorQueue::take() {
  if (empty()) return {};
  std::vector<EntryPtr> taken;
  {
    MutexLock lock(mutex_);
    waiting_.store(false, std::memory_order_seq_cst);
    taken = std::exchange(entries_, {});
  }
  timeline_.taken(taken);
  return taken;
}

void TensorQueue::finish(const EntryPtr& entry, Status status) {
  timeline_.finished(*entry, status);
  {
    MutexLock lock(mutex_);
    in_flight_.erase(entry->key);
    if (entry->request.kind == Kind::kJoin) joining_ = false;
  }
  entry->completion->finish(std::move(status));
}

std::vector<EntryPtr> TensorQueue::close(const Status& status) {
  MutexLock lock(mutex_);
  if (closed_.ok()) closed_ = status;
  waiting_.store(false, std::memory_order_seq_cst);
  return std::exchange(entries_, {});
}

}  // namespace hvdlite
