// What a rank knows of a frozen schedule: a pure state machine, one per rank, without a clock.
//
// Words: once all ranks have submitted the same cached requests in several *cycles* alike, rank 0
// *freezes* them (cycle_watch.h): its answers end with a list of cache ids, the *schedule*. From
// there on nobody negotiates. The schedule is run over and over, cut into *rounds*; *positions* in
// it are counted from the freeze on, across cycles.
//
// For each round every rank casts one *vote*, which it can never take back: the position up to
// which its program has submitted all requests of the schedule. Votes travel beside the data
// (ballot.h). The round is everything up to the lowest of all votes. Everybody sees the same votes,
// so all ranks run the same rounds, and nobody enters a collective before all members have
// submitted it: a rank that waits for votes waits where it waits for answers, outside of all
// collectives. What is submitted meanwhile travels together in the next round.
//
// A rank casts its vote once something has come that fits. A vote for the position at which the
// round begins is a vote to *thaw*. Then that is the lowest, the round is empty, and the schedule
// has ended on every rank at the same place: all ranks send to the coordinator what they have
// submitted and not run, and negotiate, with all of its errors. A rank votes so if its program
// deviates: it has submitted something that is not in the schedule, or different from it; or it
// waits for long and nothing comes; or it leaves. It also says so to rank 0, which tells all, so
// that ranks whose programs submit nothing vote, too. A rank that has cast its vote already waits
// for the end of this round, and thaws the next one.
//
// What ranks had sent to the coordinator before they saw the freeze is void there (the epoch in
// wire/message.h): they admit it to the schedule, or send it once more after the thaw.
//
// The negotiator owns it, and only the runner calls it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace hvdlite {

class FrozenSchedule {
 public:
  bool on() const { return !ids_.empty(); }
  // Begins a schedule; ids are different, and there is at least one. The numbers of rounds go on
  // from one schedule to the next.
  void begin(std::vector<std::uint32_t> ids);
  // This rank has submitted the request. False: it is not in the schedule, so the schedule must
  // thaw.
  bool admit(std::uint32_t id);
  // From the next vote on this rank votes to thaw.
  void thaw() { thaws_ = true; }
  bool thaws() const { return thaws_; }

  std::uint64_t round() const { return round_; }        // the one under way, from 1 on
  std::uint64_t position() const { return position_; }  // at which it begins
  bool voted() const { return voted_; }
  // Whether there is a vote to cast.
  bool can_vote() const { return on() && !voted_ && (thaws_ || ready_ > position_); }
  // What can_vote() asks for. The vote is cast with this.
  std::uint64_t vote();
  // All votes of the round are known, and this is the lowest. Returns the slots to run, in order;
  // none: the schedule has thawed, and is off.
  std::vector<std::uint32_t> decide(std::uint64_t lowest);

  const std::vector<std::uint32_t>& ids() const { return ids_; }
  // The index in ids(); nothing where the id is not in the schedule.
  std::optional<std::uint32_t> slot_of(std::uint32_t id) const;
  std::uint32_t slot_at(std::uint64_t position) const {
    return static_cast<std::uint32_t>(position % ids_.size());
  }

 private:
  std::vector<std::uint32_t> ids_;    // by slot; empty: there is no schedule
  std::vector<std::uint32_t> slots_;  // by id: the slot and 1, or 0
  std::vector<bool> submitted_;       // by slot: this rank has submitted it, and it has not run
  std::uint64_t round_ = 1;
  std::uint64_t position_ = 0;
  std::uint64_t ready_ = 0;  // the position behind what this rank has submitted without a gap
  bool voted_ = false;
  bool thaws_ = false;
};

}  // namespace hvdlite
