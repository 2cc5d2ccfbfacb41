// Which settings to measure next, and which are the best: a search without clock, I/O or thread.
//
// Words: a *sample* is the speed measured with some settings. A *duel* pairs a candidate with the
// incumbent: both are measured again and again, next to each other in time, so that what disturbs
// the machine disturbs both. A pair is a win when the candidate is faster by kMargin. A candidate
// takes the incumbent's place when it wins kTrialWins pairs before it loses as many.
//
// The search is a coordinate descent on a grid of powers of kFactor around the start: one knob
// after the other moves up, or else down, as long as its candidates win, until no knob moves any
// more. What is found then duels with the start, and has to win kFinalWins pairs before it loses
// kFinalLosses; else the start stays. So chance may waste a trial, but hardly ends the search with
// settings worse than those it began with. The rules bound the number of samples (most_samples).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/tunables.h"

namespace hvdlite {

// One knob of the search. Values from `plateau` on act like it: larger ones are not tried.
struct TuningAxis {
  std::int64_t Tunables::* knob = nullptr;
  std::int64_t least = 1;
  std::int64_t plateau = 1;
};

// Candidate against defender, as far as it has come.
struct Duel {
  Tunables candidate;
  Tunables defender;
  int wins_needed = 0;
  int losses_allowed = 0;  // the duel is lost with so many
  int wins = 0;
  int losses = 0;
  std::vector<double> rates;   // of the pair under way
  std::vector<double> ratios;  // candidate to defender, by pair

  bool won() const { return wins >= wins_needed; }
  bool over() const { return won() || losses >= losses_allowed; }
  // Every other pair begins with the candidate: fewer changes, and a drift cancels out.
  bool candidate_is_next() const { return (ratios.size() + rates.size()) % 2 == 1; }
  void record(double rate);
  double gain() const;  // median ratio (the lower of two), less 1
};

class TuningSearch {
 public:
  static constexpr int kFactor = 4;
  static constexpr double kMargin = 0.03;
  static constexpr int kTrialWins = 2;
  static constexpr int kFinalWins = 5;
  static constexpr int kFinalLosses = 2;

  enum class Phase { kTrying, kChecking, kDone };

  // `most_trials` bounds the candidates that are tried, without the final duel.
  TuningSearch(const Tunables& start, std::vector<TuningAxis> axes, int most_trials);

  Phase phase() const { return phase_; }
  // The settings that the next sample is taken with; the best ones when done.
  const Tunables& to_measure() const;
  // A sample taken with to_measure(), in any unit that grows with speed.
  void record(double rate);
  // The best settings so far; before the search is done they may have won by chance.
  const Tunables& best() const { return incumbent_; }
  // How much faster the best ones are than the start, as the final duel says: 0.1 is ten per cent.
  double gain() const { return gain_; }
  int trials() const { return trials_; }
  // The duel that the last record() ended, if it did.
  const std::optional<Duel>& ended() const { return ended_; }

  // No search takes more samples.
  static int most_samples(int most_trials) {
    return 2 * (most_trials * (2 * kTrialWins - 1) + kFinalWins + kFinalLosses - 1);
  }

 private:
  void begin_duel(const Tunables& candidate, const Tunables& defender, int wins, int losses);
  void end_trial(bool won);
  void propose();                        // the next trial; the final duel after the last
  bool step(Tunables& candidate) const;  // false: there is nothing to try in this direction
  void turn();                           // to the other direction, or else to the next axis
  void end_search();

  const Tunables start_;
  const std::vector<TuningAxis> axes_;
  const int most_trials_;
  Phase phase_ = Phase::kTrying;
  Tunables incumbent_;
  Duel duel_;
  std::optional<Duel> ended_;
  double gain_ = 0;
  int trials_ = 0;
  // The place of the descent.
  std::size_t axis_ = 0;
  bool upwards_ = true;
  bool moved_ = false;       // along this axis
  std::size_t settled_ = 0;  // axes in a row that did not move
};

}  // namespace hvdlite
