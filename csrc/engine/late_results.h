// This rank's part in late gradients, where it is late: what takes part instead of it, the results
// that wait for it, and the gradients that wait for a later step. late_gradients.h is rank 0's
// part.
//
// Words: where an answer names this rank late, an entry of the engine's own takes part in the
// collective, the *proxy*. Its result *waits* until the submission of the name comes, first in,
// first out: the submission, or *late entry*, gets a copy and is done. What the late entry would
// have given is added to the *standing* gradient of its name, which goes into the next collective
// of that name, whether by a proxy or together with an entry that participates. By the policy
// "drop" it is forgotten.
//
// A late entry may come before its answer (they cross), between the answer and the end of the
// collective, or after it. EngineParts own it. Only the runner calls it, except check() and
// attendance(), which any thread calls.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/entry.h"
#include "engine/tensor_queue.h"

namespace hvdlite {

// Who was late in late gradients, for people and for the optimizer; by LateTerms::key, as this rank
// sees it.
//
// Words: a *step* of a key begins when one of its names is answered a second time; likewise this
// rank's own step, when it submits a name a second time. Results *wait* from the answer until this
// rank submits the name that it was late with; a step waits *whole* when all its results do.
//
// LateResults owns it. The runner calls the functions that write, any thread the others; the mutex
// guards all.
class Attendance {
 public:
  // One rank has these numbers.
  struct Row {
    std::uint64_t late = 0;     // steps
    std::uint64_t skipped = 0;  // It gave nothing to so many of these, then or later.
    std::uint64_t folded = 0;   // It gave to so many of these later.
    std::uint64_t oldest = 0;   // the most steps from a gradient to the collective that it is in
  };

  Attendance(int rank, int size) : rank_(rank), size_(size) {}

  // A collective of the key was answered without the gradients of these ranks. Returns the number
  // of its step.
  std::uint64_t answered(const std::string& key, const std::string& name,
                         const std::vector<int>& late);
  // This rank has submitted `name`, whose result of this step waited.
  void taken(const std::string& key, const std::string& name, std::uint64_t step, bool skips,
             bool folds);
  // What this rank gave so many steps late is in a collective.
  void folded(const std::string& key, std::uint64_t age);
  // Nothing waits any more, of any key.
  void clear();

  // The steps that wait whole for this rank.
  int waiting(const std::string& key) const;
  // Each rank has a row. `late` is known of all ranks, the rest of this one.
  std::vector<Row> rows(const std::string& key) const;

 private:
  struct Waiting {
    std::size_t results = 0;  // The step has so many.
    std::size_t taken = 0;    // So many of these were taken.
  };
  struct Key {
    std::vector<Row> rows;                   // Each rank has one.
    std::uint64_t step = 0;                  // The last answer was in this step.
    std::unordered_set<std::string> names;   // answered in that step
    std::size_t names_before = SIZE_MAX;     // how many names the step before had
    std::map<std::uint64_t, Waiting> waits;  // The key is a step.
    std::unordered_set<std::string> own;     // submitted late in this rank's own step
  };
  Key& open(const std::string& key) HVDLITE_REQUIRES(mutex_);

  const int rank_;
  const int size_;
  mutable Mutex mutex_;
  std::map<std::string, Key> keys_ HVDLITE_GUARDED_BY(mutex_);
};

class LateResults {
 public:
  // `queue` is borrowed, and ends entries.
  LateResults(int rank, int size, TensorQueue& queue)
      : rank_(rank), queue_(queue), attendance_(rank, size) {}

  // What is wrong with an entry of this process set, which has passed check_entry():
  // kInvalidArgument.
  Status check(const Entry& entry, const Group& group, bool elastic) const;
  // This rank has submitted an entry. True: it is late, and ends when its result is there.
  bool take(const EntryPtr& entry);
  // The answer to an entry that participates: the standing gradient of its name goes into what the
  // entry gives.
  void answered(Entry& entry, const std::vector<int>& late);
  // The answer to a request that this rank is late with. `crossed`: its late entry, where that came
  // before, or null. Returns the proxy. kInternal: there is no memory for it.
  Result<EntryPtr> answered_without(const Request& request, const std::vector<int>& late,
                                    EntryPtr crossed);
  // This rank is late with what has ended with an error, before any collective: the error waits.
  void failed_without(const std::string& key, const Status& error);
  // What waits and stands is dropped.
  void forget(std::uint32_t process_set);
  void all_joined();

  const Attendance& attendance() const { return attendance_; }

 private:
  using Memory = std::unique_ptr<std::byte[]>;

  // A result that waits.
  struct Waiting {
    EntryPtr proxy;
    std::vector<Memory> memory;  // the proxy's, by tensor
    EntryPtr late;               // It is null until it comes.
    std::uint64_t number = 0;    // The answers of a name are counted; this is the one.
    std::uint64_t step = 0;      // as Attendance counts
  };
  using WaitingPtr = std::shared_ptr<Waiting>;
  struct Standing {
    std::vector<Memory> sums;  // Each is a tensor's sum of weight * gradient.
    double weight = 0;         // All gradients in the sums have it; 0: there are none.
    std::uint64_t oldest = 0;  // the answer that the oldest of them was late for
  };
  struct Name {
    std::deque<WaitingPtr> waiting;    // for late entries that have not come
    std::vector<TensorShape> tensors;  // The standing gradient has these.
    Standing standing;
    std::uint64_t answers = 0;
  };

  // Memory of so many bytes, which is written already where it has been used before: fresh pages
  // would make all ranks wait. Null: there is none.
  Memory allocate(std::uint64_t bytes);
  void give_back(Memory memory, std::uint64_t bytes);
  // Makes an entry of the engine's own, with its results in its own memory. False: there is none.
  bool make_proxy(const Request& request, Waiting& waiting);
  void attach(Name& name, const WaitingPtr& waiting, EntryPtr late);
  // Adds what the late entry would have given. kOutOfMemory: it is lost.
  Status stand(Name& name, const Entry& late, std::uint64_t number);
  // Writes the standing gradient and the entry's own, if that has a weight, to the outputs, and
  // makes the entry give it.
  void merge(Name& name, Entry& entry);
  void deliver(Waiting& waiting);

  const int rank_;
  TensorQueue& queue_;
  Attendance attendance_;
  std::unordered_map<std::string, Name> names_;           // The key is Request::key().
  std::unordered_multimap<std::uint64_t, Memory> spare_;  // The key is a number of bytes.
};

}  // namespace hvdlite
