// Who was late in late gradients, for people and for the optimizer; by LateTerms::key, as this rank
// sees it.
//
// Words: a *step* of a key begins when one of its names is answered a second time; likewise this
// rank's own step, when it submits a name a second time. Results *wait* from the answer until this
// rank submits the name that it was late with; a step waits *whole* when all its results do.
//
// LateResults owns it. The runner calls the functions that write, any thread the others; the mutex
// guards all.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/mutex.h"

namespace hvdlite {

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

}  // namespace hvdlite
