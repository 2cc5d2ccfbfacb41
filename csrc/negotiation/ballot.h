// Where the votes on the rounds of a frozen schedule lie (frozen_schedule.h): beside the data, not
// in messages of the control plane.
//
// A rank's vote is a line in its segment, which the ranks of its host read. The one of them who is
// last to vote sees all votes, and rings the others: one wake-up for each rank. On several hosts it
// rings the *leader* of the host instead, the lowest rank. Leaders send each other the lowest vote
// of their host, in front of the data of the round, on the same channels; each then leaves the
// lowest of all in its segment, and rings its host. A vote also carries a check of the schedule,
// which must be the same on all ranks, and when the rank's program submitted what it votes for
// (Stamps), for rank 0.
//
// Two lines take turns: nobody votes on round r + 2 before all have voted on round r + 1, and who
// has done that has read all of round r. On a channel, nothing but data of the round follows a
// vote until all votes are there; and nobody votes before all earlier collectives have ended here.
//
// A rank that has left cleanly without a vote on the round is counted as a vote to thaw.
//
// The negotiator owns it, and only the runner calls it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transport/fabric.h"
#include "wire/message.h"

namespace hvdlite {

struct Vote {
  std::uint64_t round = 0;
  std::uint64_t until = 0;
  std::uint64_t check = 0;
  Stamps stamps;
};

class Ballot {
 public:
  explicit Ballot(Fabric& fabric);  // borrowed

  // This rank votes on the next round, which begins at `position`: once all earlier collectives
  // have ended here.
  void cast(const Vote& vote, std::uint64_t position);
  // Looks for the votes that are still missing in the round that this rank has voted on, and moves
  // those between hosts. True: all are there, or there is an error(). Cheap enough to spin on.
  bool count();
  // The lowest of all votes, once count() has returned true. kInternal: a rank votes on another
  // schedule.
  Result<std::uint64_t> lowest() const;
  // Rank 0, once count() has returned true: the stamps of that vote.
  const Stamps& stamps(int rank) const { return stamps_[rank]; }
  // The rank has left cleanly, and votes no more.
  void excuse(int rank) { gone_[rank] = true; }
  // For whom this rank waits, after count() has returned false.
  struct Missing {
    std::vector<int> ranks;
    // Only some of them are missing, at least one: all of this host have voted, and of other hosts
    // this rank knows no more.
    bool some = false;
  };
  Missing missing() const;

 private:
  struct Other {  // the leader of another host
    int rank = -1;
    int locals = 0;  // ranks of its host
    Bytes outgoing;  // of this rank's vote
    Bytes incoming;  // so much of its vote as has arrived
    bool counted = false;
  };
  bool leads() const { return locals_[0] == rank_; }
  bool spans_hosts() const { return locals_.size() < gone_.size(); }
  bool count_locals();
  // Puts the vote of a local of the round under way among those seen, if it is there.
  bool look_at(int rank);
  void add(int rank, std::uint64_t until, std::uint64_t check);
  void tell_leaders();
  bool count_leaders();
  bool read_vote(Other& other);
  bool take_decision();
  void leave_decision();

  Fabric& fabric_;
  const int rank_;
  std::vector<int> locals_;     // the ranks of this host, ascending
  std::vector<Other> others_;   // this rank leads its host: the other leaders
  std::vector<bool> gone_;      // by rank
  Vote vote_;                   // this rank's last
  std::uint64_t position_ = 0;  // at which its round begins
  // Of that round:
  std::size_t counted_ = 0;  // the first of the locals that were seen
  bool told_ = false;        // the other leaders have the vote of this host, or it is on its way
  bool complete_ = false;    // all votes are there
  std::uint64_t lowest_ = 0;
  int misfit_ = -1;             // a rank that votes on another schedule
  std::vector<Stamps> stamps_;  // by rank; rank 0
};

}  // namespace hvdlite
