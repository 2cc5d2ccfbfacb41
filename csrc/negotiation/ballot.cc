#include "negotiation/ballot.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hvdlite {
namespace {

// What a leader tells another one; to rank 0 the stamps of its host's ranks follow.
struct HostVote {
  std::uint64_t round = 0;
  std::uint64_t until = 0;
  std::uint64_t check = 0;
};

BallotLine& line_of(const Segment& segment, std::uint64_t round) {
  return segment.ballot().votes[round % kBallotLines];
}

BallotLine& decision_of(const Segment& segment, std::uint64_t round) {
  return segment.ballot().decisions[round % kBallotLines];
}

// The number of the round comes last: who sees it sees the rest.
void write(BallotLine& line, const Vote& vote) {
  line.until.store(vote.until, std::memory_order_relaxed);
  line.check.store(vote.check, std::memory_order_relaxed);
  line.first.store(vote.stamps.first, std::memory_order_relaxed);
  line.last.store(vote.stamps.last, std::memory_order_relaxed);
  line.round.store(vote.round);
}

}  // namespace

Ballot::Ballot(Fabric& fabric)
    : fabric_(fabric),
      rank_(fabric.topology.rank),
      locals_(fabric.topology.ranks_on(fabric.topology.host_of[rank_])),
      gone_(fabric.topology.size),
      stamps_(rank_ == 0 ? fabric.topology.size : 0) {
  if (!leads()) return;
  for (int host = 0; host < fabric.topology.host_count(); ++host) {
    const std::vector<int> ranks = fabric.topology.ranks_on(host);
    if (ranks.empty() || ranks[0] == rank_) continue;
    others_.push_back({ranks[0], static_cast<int>(ranks.size()), {}, {}, false});
  }
}

void Ballot::cast(const Vote& vote, std::uint64_t position) {
  vote_ = vote;
  position_ = position;
  counted_ = 0;
  told_ = complete_ = false;
  lowest_ = UINT64_MAX;
  misfit_ = -1;
  for (Other& other : others_) {
    other.incoming.clear();
    other.counted = false;
  }
  write(line_of(*fabric_.own_segment, vote.round), vote);
  if (!count_locals()) return;
  if (spans_hosts()) {
    if (!leads()) fabric_.bells[locals_[0]].ring();
    return;
  }
  for (const int local : locals_) {
    if (local != rank_) fabric_.bells[local].ring();
  }
}

bool Ballot::count() {
  if (complete_) return true;
  const bool locals_voted = count_locals();
  if (!spans_hosts()) {
    complete_ = locals_voted;
  } else if (!leads()) {
    complete_ = take_decision();
  } else if (locals_voted) {
    tell_leaders();
    complete_ = count_leaders();
    if (complete_) leave_decision();
  }
  return complete_;
}

bool Ballot::count_locals() {
  while (counted_ < locals_.size() && look_at(locals_[counted_])) ++counted_;
  return counted_ == locals_.size();
}

bool Ballot::look_at(int rank) {
  const bool was_gone = gone_[rank];  // before this looks at its line
  const BallotLine& line = line_of(*fabric_.segments[rank], vote_.round);
  if (line.round.load() == vote_.round) {
    if (rank_ == 0) {
      stamps_[rank] = {line.first.load(std::memory_order_relaxed),
                       line.last.load(std::memory_order_relaxed)};
    }
    add(rank, line.until.load(std::memory_order_relaxed),
        line.check.load(std::memory_order_relaxed));
    return true;
  }
  if (!was_gone) return false;
  add(rank, position_, vote_.check);
  return true;
}

void Ballot::add(int rank, std::uint64_t until, std::uint64_t check) {
  lowest_ = std::min(lowest_, until);
  if (check != vote_.check && misfit_ < 0) misfit_ = rank;
}

void Ballot::tell_leaders() {
  if (std::exchange(told_, true)) return;
  const HostVote vote{vote_.round, lowest_, vote_.check};
  for (Other& other : others_) {
    Writer writer;
    writer.put(vote.round);
    writer.put(vote.until);
    writer.put(vote.check);
    for (const int local : locals_) {
      if (other.rank != 0) break;
      const BallotLine& line = line_of(*fabric_.segments[local], vote_.round);
      writer.put(line.first.load(std::memory_order_relaxed));
      writer.put(line.last.load(std::memory_order_relaxed));
    }
    other.outgoing = writer.take();
  }
}

bool Ballot::count_leaders() {
  bool complete = true;
  for (Other& other : others_) {
    Bytes& outgoing = other.outgoing;
    if (!outgoing.empty()) {
      // Where a peer has gone the control plane says why.
      const Result<std::size_t> written = fabric_.data[other.rank]->try_write(outgoing);
      const std::size_t bytes = written.ok() ? written.value() : outgoing.size();
      outgoing.erase(outgoing.begin(), outgoing.begin() + static_cast<std::ptrdiff_t>(bytes));
    }
    if (!other.counted) other.counted = read_vote(other);
    complete = complete && other.counted && outgoing.empty();
  }
  return complete;
}

bool Ballot::read_vote(Other& other) {
  const std::size_t whole = sizeof(HostVote) + (rank_ == 0 ? other.locals * sizeof(Stamps) : 0);
  const std::size_t had = other.incoming.size();
  other.incoming.resize(whole);
  const Result<std::size_t> got =
      fabric_.data[other.rank]->try_read(std::span(other.incoming).subspan(had));
  other.incoming.resize(had + (got.ok() ? got.value() : 0));
  if (other.incoming.size() < whole) {
    if (got.ok() || !gone_[other.rank]) return false;
    add(other.rank, position_, vote_.check);
    return true;
  }
  Reader reader(other.incoming);
  const auto round = reader.get<std::uint64_t>();
  const auto until = reader.get<std::uint64_t>();
  const auto check = reader.get<std::uint64_t>();
  add(other.rank, until, round == vote_.round ? check : ~vote_.check);
  if (rank_ != 0) return true;
  for (const int rank : fabric_.topology.ranks_on(fabric_.topology.host_of[other.rank])) {
    stamps_[rank].first = reader.get<std::int64_t>();
    stamps_[rank].last = reader.get<std::int64_t>();
  }
  return true;
}

void Ballot::leave_decision() {
  const std::uint64_t check = misfit_ < 0 ? vote_.check : ~vote_.check;
  write(decision_of(*fabric_.own_segment, vote_.round), {vote_.round, lowest_, check, {}});
  for (const int local : locals_) {
    if (local != rank_) fabric_.bells[local].ring();
  }
}

bool Ballot::take_decision() {
  const int leader = locals_[0];
  const bool was_gone = gone_[leader];
  const BallotLine& line = decision_of(*fabric_.segments[leader], vote_.round);
  if (line.round.load() == vote_.round) {
    add(leader, line.until.load(std::memory_order_relaxed),
        line.check.load(std::memory_order_relaxed));
    return true;
  }
  if (!was_gone) return false;
  add(leader, position_, vote_.check);
  return true;
}

Result<std::uint64_t> Ballot::lowest() const {
  if (misfit_ < 0) return lowest_;
  return Status(StatusCode::kInternal,
                "rank " + std::to_string(misfit_) + " votes on another frozen schedule than rank " +
                    std::to_string(rank_) + "; run with HVDLITE_FREEZE=0, and report this",
                misfit_);
}

Ballot::Missing Ballot::missing() const {
  Missing found;
  for (std::size_t i = counted_; i < locals_.size(); ++i) {
    const int local = locals_[i];
    const BallotLine& line = line_of(*fabric_.segments[local], vote_.round);
    if (line.round.load() != vote_.round && !gone_[local]) found.ranks.push_back(local);
  }
  if (!found.ranks.empty()) return found;
  const Topology& topology = fabric_.topology;
  for (int rank = 0; rank < topology.size; ++rank) {
    const int host = topology.host_of[rank];
    const bool told = std::any_of(others_.begin(), others_.end(), [&](const Other& other) {
      return other.counted && topology.host_of[other.rank] == host;
    });
    if (!topology.same_host(rank) && !told) found.ranks.push_back(rank);
  }
  found.some = found.ranks.size() > 1;
  return found;
}

}  // namespace hvdlite
