#include "engine/late_results.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "engine/entry.h"
#include "kernels/reduce.h"

namespace hvdlite {

Attendance::Key& Attendance::open(const std::string& key) {
  const auto [at, is_new] = keys_.try_emplace(key);
  if (is_new) at->second.rows.resize(static_cast<std::size_t>(size_));
  return at->second;
}

std::uint64_t Attendance::answered(const std::string& key, const std::string& name,
                                   const std::vector<int>& late) {
  MutexLock lock(mutex_);
  Key& one = open(key);
  if (one.names.contains(name)) {
    one.names_before = one.names.size();
    one.names.clear();
    ++one.step;
  }
  if (one.names.empty()) {
    for (const int rank : late) {
      const bool exists = rank >= 0 && rank < size_;  // the list has come from a peer
      if (exists) ++one.rows[static_cast<std::size_t>(rank)].late;
    }
  }
  one.names.insert(name);
  if (std::binary_search(late.begin(), late.end(), rank_)) ++one.waits[one.step].results;
  return one.step;
}

void Attendance::taken(const std::string& key, const std::string& name, std::uint64_t step,
                       bool skips, bool folds) {
  MutexLock lock(mutex_);
  Key& one = open(key);
  if (one.own.contains(name)) one.own.clear();
  if (one.own.empty()) {
    Row& row = one.rows[static_cast<std::size_t>(rank_)];
    row.skipped += skips ? 1 : 0;
    row.folded += folds ? 1 : 0;
  }
  one.own.insert(name);
  const auto at = one.waits.find(step);
  if (at == one.waits.end()) return;
  ++at->second.taken;
  // The step of the last answer may still get more results.
  one.waits.erase(one.waits.begin(), one.waits.lower_bound(std::min(step, one.step)));
}

void Attendance::folded(const std::string& key, std::uint64_t age) {
  MutexLock lock(mutex_);
  Row& row = open(key).rows[static_cast<std::size_t>(rank_)];
  row.oldest = std::max(row.oldest, age);
}

void Attendance::clear() {
  MutexLock lock(mutex_);
  for (auto& [name, key] : keys_) key.waits.clear();
}

int Attendance::waiting(const std::string& key) const {
  MutexLock lock(mutex_);
  const auto found = keys_.find(key);
  if (found == keys_.end()) return 0;
  const Key& one = found->second;
  int whole = 0;
  for (const auto& [step, waiting] : one.waits) {
    const bool complete = step < one.step || one.names.size() >= one.names_before;
    if (complete && waiting.taken == 0) ++whole;
  }
  return whole;
}

std::vector<Attendance::Row> Attendance::rows(const std::string& key) const {
  MutexLock lock(mutex_);
  const auto found = keys_.find(key);
  return found == keys_.end() ? std::vector<Row>(static_cast<std::size_t>(size_))
                              : found->second.rows;
}

Status LateResults::check(const Entry& entry, const Group& group, bool elastic) const {
  const Request& request = entry.request;
  const LateTerms& terms = *request.late;
  if (request.kind != Kind::kAllreduce || !request.weighted) {
    return invalid_call(request, "late gradients are of an allreduce by average");
  }
  for (const TensorShape& tensor : request.tensors) {
    if (tensor.device == DeviceType::kGpu) {
      return invalid_call(request,
                          "late gradients are in host memory, because results wait there for "
                          "ranks that are late; copy the gradients to the host");
    }
    if (!is_floating(tensor.dtype)) {
      return invalid_call(
          request, "'" + request.tensor_name(tensor) + "', of dtype " +
                       std::string(name_of(tensor.dtype)) +
                       ", cannot be given late; late gradients are real floating-point tensors");
    }
  }
  if (terms.key.empty() || terms.key.size() > kMaxNameBytes) {
    return invalid_call(request, "the key of late gradients has 1 to 512 bytes");
  }
  if (terms.quorum < 1 || terms.quorum > group.ranks.size()) {
    return invalid_call(request, "the quorum of late gradients is a number of ranks from 1 to " +
                                     std::to_string(group.ranks.size()) + ", not " +
                                     std::to_string(terms.quorum));
  }
  if (terms.bound < 1 || terms.grace_us < 0 || terms.grace_us > kMaxGraceUs) {
    return invalid_call(request,
                        "late gradients have a bound of at least one step, and a grace from 0 "
                        "to 2^40 microseconds");
  }
  if (!elastic) return Status();
  return invalid_call(request,
                      "an elastic job has no late gradients: what waits for a late rank would "
                      "be lost with the world; train it without `late`");
}

LateResults::Memory LateResults::allocate(std::uint64_t bytes) {
  if (auto node = spare_.extract(bytes)) return std::move(node.mapped());
  return Memory(new (std::nothrow) std::byte[std::max<std::uint64_t>(bytes, 1)]);
}

void LateResults::give_back(Memory memory, std::uint64_t bytes) {
  spare_.emplace(bytes, std::move(memory));
}

bool LateResults::make_proxy(const Request& request, Waiting& waiting) {
  waiting.proxy = std::make_shared<Entry>();
  waiting.proxy->request = request;
  waiting.proxy->weight = 0;
  for (const TensorShape& tensor : request.tensors) {
    waiting.memory.push_back(allocate(tensor.bytes()));
    if (waiting.memory.back() == nullptr) return false;
    waiting.proxy->inputs.push_back(waiting.memory.back().get());
    waiting.proxy->outputs.push_back(waiting.memory.back().get());
  }
  return true;
}

bool LateResults::take(const EntryPtr& entry) {
  const auto found = names_.find(entry->key);
  if (found == names_.end() || found->second.waiting.empty()) return false;
  Name& name = found->second;
  const WaitingPtr waiting = std::move(name.waiting.front());
  name.waiting.pop_front();
  attach(name, waiting, entry);
  return true;
}

void LateResults::attach(Name& name, const WaitingPtr& waiting, EntryPtr late) {
  const LateTerms& call = *late->request.late;
  const bool folds = call.fold && late->weight > 0;
  attendance_.taken(call.key, late->request.name, waiting->step, late->skips, folds);
  waiting->late = std::move(late);
  if (folds) {
    if (Status status = stand(name, *waiting->late, waiting->number); !status.ok()) {
      return queue_.finish(std::exchange(waiting->late, nullptr), std::move(status));
    }
  }
  Completion& end = *waiting->proxy->completion;
  if (!end.then_unless_done([this, waiting] { deliver(*waiting); })) deliver(*waiting);
}

Status LateResults::stand(Name& name, const Entry& late, std::uint64_t number) {
  Standing& standing = name.standing;
  const std::vector<TensorShape>& tensors = late.request.tensors;
  if (standing.weight == 0 || name.tensors != tensors) {
    standing = {};
    name.tensors = tensors;
    standing.oldest = number;
  }
  if (standing.sums.empty()) {
    for (const TensorShape& tensor : tensors) {
      const std::uint64_t bytes = tensor.count() * fold_size_of(tensor.dtype);
      standing.sums.push_back(allocate(bytes));
      if (standing.sums.back() == nullptr) {
        standing = {};
        return Status(StatusCode::kOutOfMemory,
                      describe(late.request) +
                          ": there is no memory for a gradient that is late, " +
                          std::to_string(bytes) + " bytes, on rank " + std::to_string(rank_) +
                          "; choose a smaller bound=",
                      rank_);
      }
      std::memset(standing.sums.back().get(), 0, bytes);
    }
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    fold_in(tensors[i].dtype, standing.sums[i].get(), late.inputs[i], tensors[i].count(),
            late.weight);
  }
  standing.weight += late.weight;
  return Status();
}

void LateResults::answered(Entry& entry, const std::vector<int>& late) {
  Name& name = names_[entry.key];
  (void)attendance_.answered(entry.request.late->key, entry.request.name, late);
  merge(name, entry);
  ++name.answers;
}

Result<EntryPtr> LateResults::answered_without(const Request& request, const std::vector<int>& late,
                                               EntryPtr crossed) {
  auto waiting = std::make_shared<Waiting>();
  if (!make_proxy(request, *waiting)) {
    Status error(StatusCode::kInternal,
                 describe(request) + ": there is no memory for a result that waits for rank " +
                     std::to_string(rank_) + ", which is late",
                 rank_);
    if (crossed != nullptr) queue_.finish(crossed, error);
    return error;
  }
  Name& name = names_[request.key()];
  merge(name, *waiting->proxy);
  waiting->number = name.answers++;
  waiting->step = attendance_.answered(request.late->key, request.name, late);
  EntryPtr proxy = waiting->proxy;
  if (crossed != nullptr) {
    attach(name, waiting, std::move(crossed));
  } else {
    name.waiting.push_back(std::move(waiting));
  }
  return proxy;
}

void LateResults::failed_without(const std::string& key, const Status& error) {
  auto waiting = std::make_shared<Waiting>();
  waiting->proxy = std::make_shared<Entry>();
  waiting->proxy->completion->finish(error);
  Name& name = names_[key];
  waiting->number = name.answers++;
  waiting->step = UINT64_MAX;
  name.waiting.push_back(std::move(waiting));
}

void LateResults::merge(Name& name, Entry& entry) {
  Standing standing = std::exchange(name.standing, {});
  const std::vector<TensorShape>& tensors = entry.request.tensors;
  // Where the name has other tensors than before, what stands does not fit any more.
  if (standing.weight == 0 || name.tensors != tensors) return;
  const double total = standing.weight + entry.weight;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    fold_out(tensors[i].dtype, standing.sums[i].get(), entry.inputs[i], entry.outputs[i],
             tensors[i].count(), entry.weight, total);
    entry.inputs[i] = entry.outputs[i];
    give_back(std::move(standing.sums[i]), tensors[i].count() * fold_size_of(tensors[i].dtype));
  }
  entry.weight = total;
  attendance_.folded(entry.request.late->key, name.answers - standing.oldest);
}

void LateResults::deliver(Waiting& waiting) {
  const EntryPtr late = std::exchange(waiting.late, nullptr);
  Entry& proxy = *waiting.proxy;
  Status status = proxy.completion->status();
  if (status.ok() && !(proxy.request == late->request)) {
    status =
        Status(StatusCode::kMismatch,
               describe(late->request) + ": ranks disagree about the dtype, the shape or the " +
                   "late gradients: rank " + std::to_string(rank_) +
                   ", which is late, submits others than the ranks that were in time; build the "
                   "model alike on every rank",
               rank_);
  }
  if (status.ok()) {
    for (std::size_t i = 0; i < proxy.outputs.size(); ++i) {
      const std::uint64_t bytes = proxy.request.tensors[i].bytes();
      if (bytes > 0) std::memcpy(late->outputs[i], proxy.outputs[i], bytes);
    }
    late->completion->members = proxy.completion->members;
    late->completion->epoch = proxy.completion->epoch;
    late->late = true;
  }
  for (std::size_t i = 0; i < waiting.memory.size(); ++i) {
    give_back(std::move(waiting.memory[i]), proxy.request.tensors[i].bytes());
  }
  queue_.finish(late, std::move(status));
}

void LateResults::forget(std::uint32_t process_set) {
  const std::string prefix = std::to_string(process_set) + ":";
  std::erase_if(names_, [&](const auto& one) { return one.first.starts_with(prefix); });
}

void LateResults::all_joined() {
  names_.clear();
  spare_.clear();
  attendance_.clear();
}

}  // namespace hvdlite
