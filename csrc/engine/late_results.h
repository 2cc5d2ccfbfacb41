// This rank's part in late gradients (negotiation/late_gradients), where it is late: what takes
// part instead of it, the results that wait for it, and the gradients that wait for a later step.
//
// Words: where an answer names this rank late, an entry of the engine's own takes part in the
// collective, the *proxy*. Its result *waits* until the submission of the name comes, first in,
// first out: the submission, or *late entry*, gets a copy and is done. What the late entry would
// have given is added to the *standing* gradient of its name, which goes into the next collective
// of that name, whether by a proxy or together with an entry that participates. By the policy
// "drop" it is forgotten.
//
// A late entry may come before its answer (they cross), between the answer and the end of the
// collective, or after it. The negotiator owns it; only the runner calls it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "entry/entry.h"
#include "execution/attendance.h"
#include "execution/tensor_queue.h"

namespace hvdlite {

class LateResults {
 public:
  // All borrowed.
  LateResults(int rank, TensorQueue& queue, Attendance& attendance)
      : rank_(rank), queue_(queue), attendance_(attendance) {}

  // This rank has submitted an entry that does not wait for all ranks. True: it is late, and ends
  // when its result is there.
  bool take(const EntryPtr& entry);
  // The answer to the entry, which participates, with these ranks late: the standing gradient of
  // its name goes into what the entry gives.
  void answer(Entry& entry, const std::vector<int>& late);
  // The answer to a request that this rank is late with. `crossed`: its late entry, where that came
  // before, or null. Returns the proxy. kInternal: there is no memory for it.
  Result<EntryPtr> answer_late(const Request& request, const std::vector<int>& late,
                               EntryPtr crossed);
  // This rank is late with what has ended with an error, before any collective: the error waits.
  void answer_error(const std::string& key, const Status& error);

  // The process set is gone, or all ranks have joined: what waits and stands is dropped.
  void forget(std::uint32_t process_set);
  void clear();

 private:
  // A result that waits.
  struct Waiting {
    EntryPtr proxy;
    EntryPtr late;             // null until it comes
    std::uint64_t number = 0;  // of the answer, counted by name
    std::uint64_t step = 0;    // as Attendance counts
  };
  using WaitingPtr = std::shared_ptr<Waiting>;
  struct Standing {
    std::vector<std::unique_ptr<std::byte[]>> sums;  // by tensor: of weight * gradient
    double weight = 0;         // of all gradients in the sums; 0: there are none
    std::uint64_t oldest = 0;  // the answer that the oldest of them was late for
  };
  struct Name {
    std::deque<WaitingPtr> waiting;    // for late entries that have not come
    std::vector<TensorShape> tensors;  // of the standing gradient
    Standing standing;
    std::uint64_t answers = 0;
  };

  using Memory = std::unique_ptr<std::byte[]>;

  // Memory of so many bytes, which is written already where it has been used before: fresh pages
  // would make all ranks wait. Null: there is none.
  Memory allocate(std::uint64_t bytes);
  void give_back(Memory memory, std::uint64_t bytes);
  // An entry of the engine's own, with its results in its own memory. Null: there is none.
  EntryPtr make_proxy(const Request& request);
  void attach(Name& name, const WaitingPtr& waiting, EntryPtr late);
  // Adds what the late entry would have given. kOutOfMemory: it is lost.
  Status stand(Name& name, const Entry& late, std::uint64_t number);
  // Writes the standing gradient and the entry's own, if that has a weight, to the outputs, and
  // makes the entry give it.
  void merge(Name& name, Entry& entry);
  void deliver(Waiting& waiting);

  const int rank_;
  TensorQueue& queue_;
  Attendance& attendance_;
  std::unordered_map<std::string, Name> names_;           // by Request::key()
  std::unordered_multimap<std::uint64_t, Memory> spare_;  // by bytes
};

}  // namespace hvdlite
