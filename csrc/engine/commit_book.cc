#include "engine/commit_book.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <iterator>
#include <new>
#include <thread>
#include <utility>

#include "kernels/reduce.h"

namespace hvdlite {
namespace {

// The high half of a count is the number of joins: a member that had joined missed the commits of
// the others, and all continue from the same number.
constexpr int kJoinShift = 32;

void append(std::vector<EntryPtr>& to, std::vector<EntryPtr> more) {
  to.insert(to.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

}  // namespace

void CommitBook::hold(EntryPtr entry, const Group& group) {
  const Request& request = entry->request;
  Set& set = sets_[request.process_set];
  set.group = group;
  if (request.kind == Kind::kCommit) {
    set.ending.push_back(std::move(entry));
  } else if (request.transaction.empty()) {
    set.due.push_back(std::move(entry));
  } else {
    set.held[request.transaction].push_back(std::move(entry));
  }
}

void CommitBook::end_round() {
  for (auto& [id, set] : sets_) {
    for (EntryPtr& commit : std::exchange(set.ending, {})) {
      if (auto ended = set.held.extract(commit->request.transaction)) {
        append(set.due, std::move(ended.mapped()));
      }
      set.due.push_back(std::move(commit));
    }
  }
}

std::vector<std::uint32_t> CommitBook::due_sets() const {
  std::vector<std::uint32_t> ids;
  for (const auto& [id, set] : sets_) {
    if (!set.due.empty()) ids.push_back(id);
  }
  return ids;
}

bool CommitBook::joins(const Set& set) {
  return std::any_of(set.due.begin(), set.due.end(),
                     [](const EntryPtr& entry) { return entry->request.kind == Kind::kJoin; });
}

std::uint64_t CommitBook::next_count(std::uint32_t id) const {
  MutexLock lock(mutex_);
  if (joins(sets_.at(id))) return (joins_ + 1) << kJoinShift;
  const auto found = counts_.find(id);
  return (found == counts_.end() ? joins_ << kJoinShift : found->second) + 1;
}

std::vector<EntryPtr> CommitBook::complete(std::uint32_t id) {
  const std::uint64_t count = next_count(id);
  std::vector<EntryPtr> handed_out = std::exchange(sets_.at(id).due, {});
  MutexLock lock(mutex_);
  counts_[id] = count;
  if (count >> kJoinShift != joins_) {
    joins_ = count >> kJoinShift;
    for (auto& [other, of_other] : counts_) of_other = count;
  }
  return handed_out;
}

std::vector<EntryPtr> CommitBook::drop(std::uint32_t id) {
  std::vector<EntryPtr> dropped;
  const auto set = sets_.extract(id);
  if (set.empty()) return dropped;
  for (auto& [transaction, held] : set.mapped().held) append(dropped, std::move(held));
  return dropped;
}

CommitCounts CommitBook::counts() const {
  MutexLock lock(mutex_);
  return counts_;
}

std::vector<EntryPtr> CommitBook::complete_up_to(const CommitCounts& commit_point) {
  std::vector<EntryPtr> handed_out;
  for (const std::uint32_t id : due_sets()) {
    const auto reached = commit_point.find(id);
    if (reached == commit_point.end() || reached->second < next_count(id)) continue;
    append(handed_out, complete(id));
  }
  return handed_out;
}

std::vector<EntryPtr> CommitBook::take_rest() {
  std::vector<EntryPtr> rest;
  for (auto& [id, set] : std::exchange(sets_, {})) {
    append(rest, std::move(set.due));
    append(rest, std::move(set.ending));
    for (auto& [transaction, held] : set.held) append(rest, std::move(held));
  }
  return rest;
}

std::vector<const Entry*> CommitBook::rest() const {
  std::vector<const Entry*> rest;
  for (const auto& [id, set] : sets_) {
    for (const EntryPtr& entry : set.due) rest.push_back(entry.get());
    for (const EntryPtr& entry : set.ending) rest.push_back(entry.get());
    for (const auto& [transaction, held] : set.held) {
      for (const EntryPtr& entry : held) rest.push_back(entry.get());
    }
  }
  return rest;
}
namespace {

bool overlap(const void* a, std::uint64_t a_bytes, const void* b, std::uint64_t b_bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(a);
  const auto second = reinterpret_cast<std::uintptr_t>(b);
  return first < second + b_bytes && second < first + a_bytes;
}

// Whether a result overwrites the input of the tensor: that of an all-reduce is as long as the
// input, and that of an allgather as the memory that the submitter gave for it.
bool is_overwritten(const Entry& entry, std::size_t tensor) {
  const std::uint64_t bytes = entry.request.tensors[tensor].bytes();
  const void* input = entry.inputs[tensor];
  if (bytes == 0) return false;
  if (entry.request.kind == Kind::kAllreduce) {
    return overlap(input, bytes, entry.outputs[tensor], bytes);
  }
  for (std::size_t i = 0; i < entry.capacities.size(); ++i) {
    if (overlap(input, bytes, entry.outputs[i], entry.capacities[i])) return true;
  }
  return false;
}

Status no_memory(const Entry& entry, std::uint64_t bytes, const std::string& why = "") {
  return Status(StatusCode::kInternal, describe(entry.request) + ": no memory for the " +
                                           std::to_string(bytes) +
                                           " bytes of its input that an elastic job keeps" + why);
}

// The output overlaps the input, so the memory may be written.
void* writable(const Entry& entry, std::size_t tensor) {
  return const_cast<void*>(entry.inputs[tensor]);  // NOLINT
}

Status restore_on_device(const Entry& entry, std::size_t tensor, const KeptInput& kept) {
  CudaDevice& device = kept.copied->device();
  const CudaDevice::Current current(device);
  HVDLITE_RETURN_IF_ERROR(
      device.check(device.api().copy(address(writable(entry, tensor)), kept.device.address(),
                                     entry.request.tensors[tensor].bytes(), device.stream()),
                   "restoring an input"));
  HVDLITE_ASSIGN_OR_RETURN(const CudaEventPtr end, device.record(device.stream()));
  while (!end->reached()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  return Status();
}

}  // namespace

Status KeptInputs::keep(const Batch& batch, const std::vector<Agreed>& round, const Backend& host,
                        DeviceBackend* plane) {
  const bool reduces = batch.kind == Kind::kAllreduce;
  if (!reduces && batch.kind != Kind::kAllgather) return Status();
  const bool by_plane = reduces && host.copies_inputs(batch.op);
  for (const TensorRef& ref : batch.tensors) {
    Entry& entry = *round[ref.agreed].entry;
    const TensorShape& shape = entry.request.tensors[ref.tensor];
    if (!is_overwritten(entry, ref.tensor)) continue;
    entry.kept.resize(entry.request.tensors.size());
    HVDLITE_RETURN_IF_ERROR(shape.device == DeviceType::kGpu
                                ? keep_on_device(entry, ref.tensor, plane->device())
                                : keep_on_host(entry, ref.tensor, by_plane));
  }
  return Status();
}

Status KeptInputs::keep_on_host(Entry& entry, std::size_t tensor, bool by_plane) {
  const std::uint64_t bytes = entry.request.tensors[tensor].bytes();
  KeptInput& kept = entry.kept[tensor];
  kept = take(bytes);
  if (!kept.valid()) return no_memory(entry, bytes);
  kept.copy = {kept.data.get(), 0};
  if (by_plane && entry.weight != 0) return Status();  // zeros travel in place of weight 0
  stream_copy(entry.inputs[tensor], kept.copy.to, bytes);
  kept.copy.bytes = bytes;
  return Status();
}

InputCopy* KeptInputs::copy_of(Entry& entry, std::size_t tensor) {
  if (tensor >= entry.kept.size()) return nullptr;
  InputCopy& copy = entry.kept[tensor].copy;
  return copy.to != nullptr && copy.bytes == 0 ? &copy : nullptr;
}

Status KeptInputs::keep_on_device(Entry& entry, std::size_t tensor, CudaDevice& device) {
  const std::uint64_t bytes = entry.request.tensors[tensor].bytes();
  const std::shared_ptr<DeviceMemoryPool> pool = gpus_.pool_of_kept(device.ordinal());
  Result<DeviceMemory> memory = pool->take(bytes);
  if (!memory.ok()) return no_memory(entry, bytes, " (" + memory.status().message() + ")");
  KeptInput& kept = entry.kept[tensor];
  kept.device = std::move(memory.value());
  kept.pool = pool;
  const CudaDevice::Current current(device);
  HVDLITE_RETURN_IF_ERROR(
      device.check(device.api().copy(kept.device.address(), address(entry.inputs[tensor]), bytes,
                                     device.stream()),
                   "keeping an input"));
  HVDLITE_ASSIGN_OR_RETURN(kept.copied, device.record(device.stream()));
  return Status();
}

KeptInput KeptInputs::take(std::size_t bytes) {
  // Powers of two: so the pool never has more of a size than were kept at one time. Pages that no
  // input reaches cost nothing.
  const std::size_t capacity = std::bit_ceil(bytes);
  const auto found = std::find_if(pool_.begin(), pool_.end(),
                                  [&](const KeptInput& one) { return one.capacity == capacity; });
  KeptInput taken;
  if (found == pool_.end()) {
    taken.data.reset(new (std::nothrow) std::byte[capacity]);
    taken.capacity = capacity;
    return taken;
  }
  taken = std::move(*found);
  pool_.erase(found);
  return taken;
}

void KeptInputs::release(Entry& entry) {
  for (KeptInput& kept : std::exchange(entry.kept, {})) {
    if (kept.device.valid()) {
      kept.pool->give_back(std::move(kept.device), std::move(kept.copied));
    } else if (kept.valid()) {
      pool_.push_back(std::move(kept));
    }
  }
}

Status restore_inputs(Entry& entry) {
  for (std::size_t i = 0; i < entry.kept.size(); ++i) {
    const KeptInput& kept = entry.kept[i];
    if (kept.device.valid()) {
      HVDLITE_RETURN_IF_ERROR(restore_on_device(entry, i, kept));
    } else if (kept.valid()) {
      std::memcpy(writable(entry, i), kept.copy.to, kept.copy.bytes);
    }
  }
  entry.kept.clear();
  return Status();
}

}  // namespace hvdlite
