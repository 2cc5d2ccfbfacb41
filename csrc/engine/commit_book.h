// Which results this rank may hand out: the accounts behind atomic collectives, in elastic jobs.
//
// Words. A *commit* is a barrier of a process set's members behind a round. An entry is *held* from
// its execution to the commit that hands it out: that of its round, or, if it belongs to a
// transaction, that of the round with the transaction's kCommit entry. A held entry is *due* when
// the next commit of its set hands it out. A member enters a commit after executing all that is
// ordered before it. So if one member has completed commit c, every member has the results of
// everything up to c in memory. All members have the same rounds, so their *counts* of commits
// compare; a member that had joined meets the others' counts again when all have joined.
//
// The *commit point* is, for each set, the highest count of any survivor. After a death every
// survivor hands out what is due up to the commit point, and submits all else anew.
//
// The runner of a world calls hold() and the functions of commits; any thread calls counts(). When
// the world has ended, its owner moves the book to the pending operations, which guard it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/entry.h"
#include "gpu/gpu_plane.h"
#include "host/backend.h"
#include "transport/topology.h"

namespace hvdlite {

// Each process set has a number that grows with every commit.
using CommitCounts = std::map<std::uint32_t, std::uint64_t>;

class CommitBook {
 public:
  // The entry was executed. `group` are the members that took part.
  void hold(EntryPtr entry, const Group& group);
  // All entries of the round were executed. Only now do transactions end: a round may have a commit
  // before entries that were submitted before it, because requests that members remember arrive
  // before others.
  void end_round();

  // The sets with due entries, ascending: every member goes through them in this order.
  std::vector<std::uint32_t> due_sets() const;
  // The members that take part in the next commit of a set with due entries; and these entries.
  const Group& group(std::uint32_t set) const { return sets_.at(set).group; }
  const std::vector<EntryPtr>& due(std::uint32_t set) const { return sets_.at(set).due; }
  // This rank has completed the next commit of the set: returns what it hands out.
  std::vector<EntryPtr> complete(std::uint32_t set);
  // The set was removed: returns what is held there, and no commit will ever hand out.
  std::vector<EntryPtr> drop(std::uint32_t set);

  CommitCounts counts() const;
  // Completes all commits that some survivor has completed: returns what they hand out.
  std::vector<EntryPtr> complete_up_to(const CommitCounts& commit_point);
  // Returns all entries that are left, and forgets them.
  std::vector<EntryPtr> take_rest();
  // The entries that are left.
  std::vector<const Entry*> rest() const;

 private:
  struct Set {
    Group group;
    std::vector<EntryPtr> due;
    std::vector<EntryPtr> ending;                       // commits of the round
    std::map<std::string, std::vector<EntryPtr>> held;  // The key is a transaction.
  };
  // The count of the set after its next commit.
  std::uint64_t next_count(std::uint32_t set) const;
  static bool joins(const Set& set);

  std::map<std::uint32_t, Set> sets_;
  mutable Mutex mutex_;
  CommitCounts counts_ HVDLITE_GUARDED_BY(mutex_);
  std::uint64_t joins_ HVDLITE_GUARDED_BY(mutex_) = 0;  // joins that were committed
};

// Copies of inputs that results overwrite, so that an all-reduce or an allgather can be redone
// after a rank has died in it (elastic jobs only). Other collectives are not redone, or overwrite
// nothing that they read.
//
// The copies hang on their entries; the memory comes from pools, because fresh pages cost more than
// the copy. A data plane that can makes the copy itself, part by part, when it reads the input
// anyway; of what it has not come to, the input is whole. Only the runner calls it; the executor
// owns it.
class KeptInputs {
 public:
  explicit KeptInputs(GpuPlane& gpus) : gpus_(gpus) {}  // borrowed

  // Copies what the batch is about to overwrite, or leaves the copying of host memory to `host`:
  // see copy_of(). `plane` is that of its GPU tensors, or null. The peers do not turn back, so a
  // lack of memory is kInternal.
  Status keep(const Batch& batch, const std::vector<Agreed>& round, const Backend& host,
              DeviceBackend* plane);
  // Where the host's data plane shall copy the input of the tensor, or null.
  static InputCopy* copy_of(Entry& entry, std::size_t tensor);
  // The results are handed out: takes the memory back.
  void release(Entry& entry);

 private:
  Status keep_on_host(Entry& entry, std::size_t tensor, bool by_plane);
  Status keep_on_device(Entry& entry, std::size_t tensor, CudaDevice& device);
  KeptInput take(std::size_t bytes);  // not valid where there is no memory

  GpuPlane& gpus_;
  std::vector<KeptInput> pool_;  // in host memory
};

// Writes the kept inputs of an entry back to where they were. Returns when they are there.
Status restore_inputs(Entry& entry);

}  // namespace hvdlite
