// Proves that ranks wait for each other for ever, so that they get an error instead of a warning.
//
// Words: an operation is *open* if some rank has submitted it and the coordinator has not answered
// it. A rank is *blocked* if each of its threads that could submit something waits for an open
// operation, without a time limit or with one that ends the world, and if nothing else of this rank
// is under way: no answer is on its way to it, and no collective runs there. It *awaits* the
// operations that its threads wait for, and those open ones whose end has a continuation, which
// could submit, too. Nothing happens on it until one of these is answered. An operation is *stuck*
// if it waits for a rank that is deadlocked, and a rank is *deadlocked* if it is blocked and all
// that it awaits is stuck. The largest set of ranks that fits this definition is what is looked
// for. It may be some ranks only, such as the members of a process set, while others go on.
//
// A rank *reports* that it is blocked once its threads have waited for half of the grace, so that
// an operation that ends earlier costs nothing. The coordinator looks at the report after the other
// half. A report is void as soon as the rank has submitted something, or has had an answer: the
// report says how many operations the rank had submitted when it was made, and how many of them had
// no answer, and the coordinator counts both anew. The rank takes the report back if a thread stops
// waiting for another reason.
//
// The proof assumes what a rank says of its threads; python/long_waits.h says how it knows. An
// operation that does not wait for all ranks is never stuck, because time alone may answer it; nor
// is a join, because nobody waits for a rank that has joined: it gets its answer when the others go
// on.
//
// A pure state machine without a clock. The coordinator owns it, and only the runner of rank 0
// calls it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "negotiation/pending_table.h"
#include "wire/bytes.h"
#include "wire/message.h"

namespace hvdlite {

class Coordinator;

// What a rank says while its threads wait, from each rank to the coordinator:
//
//   blocked = submitted:u64 pending:u32 count:u32 (key:text place:text)[count]
//
// Pure functions, which touch nothing beyond their bytes.
inline constexpr std::size_t kMaxKeyBytes = kMaxNameBytes + 64;  // bounds Request::key()
inline constexpr std::size_t kMaxPlaceBytes = 4200;              // PATH_MAX, and a line

struct Blocked {
  std::uint64_t submitted = 0;    // operations of this rank so far
  std::uint32_t pending = 0;      // those of them that have no answer yet
  std::vector<std::string> keys;  // Request::key() of those that it awaits; empty: not blocked
  // Where the program waits for each of them: "/home/me/train.py:12", or "".
  std::vector<std::string> places;
  bool operator==(const Blocked&) const = default;
};

Bytes encode(const Blocked& blocked);
// False: these bytes are not a report.
bool decode(std::span<const std::byte> bytes, Blocked& blocked);

// What ranks that wait for each other are told. Pure functions.
// "barrier 'x'"; a change of the process sets has no name that the user knows.
std::string describe_awaited(const Request& request);

// A rank that waits for another one in an operation.
struct Wait {
  int rank = -1;
  int awaited = -1;
  const Request* request = nullptr;  // borrowed from its table
  std::string place = "";            // " (/home/me/train.py:12)", where it is known
};
// "rank 1 waits for rank 0 in allreduce 'loss'"
std::string describe_wait(const Wait& wait);
// What the ranks of such waits do about it.
std::string advice_for(const std::vector<Wait>& waits);

class DeadlockWatch {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // `coordinator` is borrowed. With a grace of 0 seconds there is no proof.
  DeadlockWatch(double grace, Coordinator& coordinator);

  // The rank reports that it is blocked, or not any more. False: these bytes are not a report.
  bool reported(int rank, std::span<const std::byte> body, TimePoint now);
  // Fails what is stuck, where reports have become old enough.
  void tick(TimePoint now);
  std::optional<TimePoint> due() const;

 private:
  struct Report {
    Blocked blocked;
    TimePoint since;
    bool examined = false;
  };
  struct Open {
    std::uint32_t set = 0;
    std::string key;
    const PendingTensor* pending = nullptr;  // borrowed from its table
    std::vector<int> missing;
  };
  using Waits = std::map<int, std::vector<const Open*>>;  // The key is a rank.

  // The open operations by key.
  std::map<std::string, Open> open_operations() const;
  // What the threads of the rank wait for; nothing where its report does not hold.
  std::vector<const Open*> waits_of(int rank, const Report& report,
                                    const std::map<std::string, Open>& open) const;
  bool submitted_by(const Open& operation, int rank) const;
  // Leaves the ranks that are deadlocked.
  static void keep_deadlocked(Waits& waits);
  static bool stuck(const Open& operation, const Waits& waits);
  Status describe(const Open& operation, const Waits& waits) const;
  std::string describe_others(const std::vector<Wait>& path, const Waits& waits) const;
  // " (/home/me/train.py:12)", where the rank waits for the operation; "" if it does not know.
  std::string place_of(int rank, const Open& operation) const;
  void fail(const Waits& waits);

  const Patience half_;  // It is half of the grace.
  Coordinator& coordinator_;
  std::map<int, Report> reports_;  // The key is a rank.
};

}  // namespace hvdlite
