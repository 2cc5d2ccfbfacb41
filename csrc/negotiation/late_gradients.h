// Late gradients: an all-reduce goes on without the gradients of ranks that are late. The
// coordinator answers its tensors when a quorum of ranks is there and the grace has passed, and
// names the late ranks in the response. Participation says which ranks are late.
//
// The coordinator owns it, and only the runner of rank 0 calls it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "negotiation/pending_table.h"
#include "wire/message.h"

namespace hvdlite {

class Coordinator;

// Which ranks give a gradient of their own to a step, where some ranks are late. A pure state
// machine without a clock, one for each key of a process set (LateTerms::key).
//
// Words: a *step* has several names (buckets of gradients), and each member of the process set
// submits each name once for each step. A step is *open* from its first submission on. The members
// that submit something for it meanwhile *participate*. It *closes* when all members participate;
// or when a quorum of them does, the grace has passed since, and no member that is missing is
// `bound` steps behind. Then the missing ones are *late*: the collectives of the step go on without
// their gradients, and wait for those who participate. A late member submits its name all the same,
// later: it *catches up*. How far it is *behind* is the number of answers that it has not caught up
// with. A step with a request that the response cache does not know waits for all: so no request is
// used that a member has not checked. Members that have joined are absent: they neither participate
// nor are late.
//
// LateGradients owns them and numbers members by their position in the process set; only the runner
// of rank 0 calls them.
class Participation {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  explicit Participation(std::size_t members) : active_(members, true) {}

  // Whether no collective of this name was answered yet.
  bool is_new(const std::string& name) const;
  // The member has submitted `name`, which it was late with: it catches up. False: it was not late.
  bool catch_up(const std::string& name, std::size_t member);
  // The member has submitted `name`, and is not late with it. `cached`: the response cache knows
  // the request.
  void arrive(const std::string& name, std::size_t member, const LateTerms& call, bool cached);
  // Closes all steps that can be closed at `now`. True: there was one. The owner calls it when
  // something has arrived, when a member has caught up or joined, and when it is due().
  bool close(TimePoint now);
  // When close() has something to do though nothing happens.
  std::optional<TimePoint> due() const;

  // Whether the next collective of `name` waits for the member, which has not submitted it.
  bool awaits(const std::string& name, std::size_t member) const;
  // Whether all members that it waits for have submitted it.
  bool complete(const std::string& name, const Presence& submitted) const;
  // The collective of `name` is answered. Returns the members that are late with it.
  Presence answer(const std::string& name, const Presence& submitted);

  // A member joins: what it was late with it will not ask for any more.
  void join(std::size_t member);
  // All members have joined, and take part again: all names begin a new step.
  void return_all();

 private:
  struct Step {
    LateTerms call;
    Presence in;                       // who participates
    std::optional<TimePoint> quorate;  // since when a quorum participates
    bool cached = true;                // the response cache knows all requests so far
    bool closed = false;
    std::size_t unanswered = 0;  // names that somebody has submitted
  };
  struct Name {
    std::uint64_t step = 0;           // Its next answer is in this step.
    bool submitted = false;           // somebody has submitted it for that step
    bool answered = false;            // once
    std::vector<std::uint32_t> owed;  // Each member has not caught up with so many answers.
  };
  struct Count {
    std::size_t in = 0;
    std::size_t active = 0;
    std::size_t quorum = 0;
  };

  Count count(const Step& step) const;
  bool can_close(Step& step, TimePoint now) const;
  // Whether a missing member is `bound` steps behind.
  bool bounded(const Step& step) const;
  std::uint32_t behind(std::size_t member) const;
  const Step* closed_step(const std::string& name) const;
  void forget_old_steps();

  Presence active_;  // not joined
  std::map<std::uint64_t, Step> steps_;
  std::unordered_map<std::string, Name> names_;
};

class LateGradients {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  explicit LateGradients(Coordinator& coordinator) : coordinator_(coordinator) {}  // borrowed

  // Whether some request was of late gradients.
  bool used() const { return !sets_.empty(); }
  // `member` is a position in the process set. It submits a request, which is not counted yet.
  // True: the tensor was answered without the member before, and there is nothing else to do.
  bool take(PendingTable& table, std::size_t member, const Request& request, TimePoint now);
  // The request was counted in this tensor: answers what can be answered now.
  void submitted(PendingTable& table, PendingTensor& pending, std::size_t member,
                 const Request& request, TimePoint now);
  // Whether the tensor waits for the member, which has not submitted it.
  bool awaits(const PendingTable& table, const PendingTensor& pending, std::size_t member) const;
  // The tensor is answered: names the late members in the response.
  void complete(const PendingTable& table, const PendingTensor& pending, Response& response);
  // A rank has joined. All ranks have joined, and take part again. A process set is gone.
  void joined(int rank, TimePoint now);
  void all_joined();
  void forget(std::uint32_t set) { sets_.erase(set); }
  // When a step can be closed though nothing else happens; tick() closes those that can.
  std::optional<TimePoint> due() const;
  void tick(TimePoint now);

 private:
  using ByKey = std::map<std::string, Participation>;  // The key is LateTerms::key.

  static std::uint32_t id_of(const PendingTable& table) {
    return static_cast<std::uint32_t>(table.group.id);
  }
  // What decides about a tensor that has submitted() behind it.
  Participation& of(const PendingTable& table, const PendingTensor& pending) {
    return sets_.at(id_of(table)).at(pending.request.late->key);
  }
  // Answers what can be answered because a step of this key can be closed.
  void close(PendingTable& table, Participation& one, const std::string& key, TimePoint now);
  void answer_if_complete(PendingTable& table, const std::string& key, TimePoint now);

  Coordinator& coordinator_;
  std::map<std::uint32_t, ByKey> sets_;  // The key is a process set.
};

}  // namespace hvdlite
