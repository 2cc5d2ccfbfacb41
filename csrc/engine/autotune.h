// Searches faster settings while a job trains: on rank 0, from the rounds that it runs.
//
// Words: a *step* ends when the name of an all-reduce comes a second time. Its *rate* is the bytes
// that the world's all-reduces carried in it, by the time from its first round to that of the next
// step; so the time in which the program computes counts. A *sample* is a run of steps; its rate is
// the median of theirs, which a pause in one of them does not move. A *duel* pairs a candidate with
// a defender: both are sampled again and again, next to each other in time, so that what disturbs
// the machine disturbs both.
//
// The engine shows every round to Autotune, and lets the coordinator tell all ranks what it asks
// for, in band with the responses, so that every rank changes between the same two rounds
// (Round::tunables). docs/autotune.md has the rules of the search, and the fields of the log.
//
// Rank 0's engine has it while no earlier world has found settings; only the runner calls it.
// StepSampler and TuningSearch are pure: they have no clock and no I/O.
#pragma once

#include <chrono>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/config.h"
#include "engine/entry.h"

namespace hvdlite {

struct Sample {
  double rate = 0;  // bytes per second
  std::size_t steps = 0;
  std::uint64_t bytes = 0;
  double seconds = 0;
  std::uint64_t largest_step = 0;  // bytes
  bool host = false;               // some of them are of tensors in host memory
};

class StepSampler {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  // Fewer steps than asked for never make a sample; short steps make it longer.
  static constexpr double kShortestSample = 0.005;  // seconds

  explicit StepSampler(std::size_t steps) : steps_(steps) {}

  // A round begins at `now`. Returns a sample when it ended just before.
  std::optional<Sample> add(const std::vector<Agreed>& round, TimePoint now);
  // Forgets the sample under way; the next one begins with the next step.
  void restart();

 private:
  std::optional<Sample> end_step(TimePoint now);

  const std::size_t steps_;
  std::unordered_set<std::string> seen_;  // in this step
  bool running_ = false;                  // a step began within the sample
  TimePoint begin_;                       // The step began then.
  std::uint64_t bytes_ = 0;               // The step has carried so many.
  std::vector<double> rates_;             // Each step of the sample has one.
  Sample sample_;
};

// One knob of the search. Values from `plateau` on act like it: larger ones are not tried.
struct TuningAxis {
  std::int64_t Tunables::* knob = nullptr;
  std::int64_t least = 1;
  std::int64_t plateau = 1;
};

// Candidate against defender, as far as it has come. A pair of samples is a win when the candidate
// is faster by kMargin.
struct Duel {
  static constexpr double kMargin = 0.03;

  Tunables candidate;
  Tunables defender;
  int wins_needed = 0;
  int losses_allowed = 0;  // the duel is lost with so many
  int wins = 0;
  int losses = 0;
  int samples = 0;
  double candidate_rate = 0;     // The pair under way has this rate.
  double defender_rate = 0;      // The pair under way has this one, too.
  std::vector<double> ratios{};  // candidate to defender, by pair

  bool won() const { return wins >= wins_needed; }
  bool over() const { return won() || losses >= losses_allowed; }
  // Every other pair begins with the candidate: fewer changes, and a drift cancels out.
  bool candidate_is_next() const { return samples % 4 == 1 || samples % 4 == 2; }
  void record(double rate);
  double gain() const;  // median ratio (the lower of two), less 1
};

// Says which settings to measure next, and which are the best: a coordinate descent on a grid of
// powers of kFactor around the start. What it finds duels with the start at the end; so chance may
// waste a trial, but hardly ends the search with settings worse than those it began with.
class TuningSearch {
 public:
  static constexpr int kFactor = 4;
  static constexpr int kTrialWins = 2;  // before as many losses
  static constexpr int kFinalWins = 5;
  static constexpr int kFinalLosses = 2;

  enum class Phase { kTrying, kChecking, kDone };

  // `most_trials` bounds the candidates that are tried, without the final duel.
  TuningSearch(const Tunables& start, std::vector<TuningAxis> axes, int most_trials);

  Phase phase() const { return phase_; }
  // The settings that the next sample is taken with; the best ones when done.
  const Tunables& to_measure() const;
  // Takes the rate of a sample with to_measure(), in any unit that grows with speed.
  void record(double rate);
  // The best settings so far; before the search is done they may have won by chance.
  const Tunables& best() const { return incumbent_; }
  // How much faster the best ones are than the start, as the final duel says: 0.1 is ten per cent.
  double gain() const { return gain_; }
  int trials() const { return trials_; }
  // The duel that the last record() ended, if it did.
  const std::optional<Duel>& ended() const { return ended_; }

 private:
  void propose();                        // the next trial; the final duel after the last
  bool step(Tunables& candidate) const;  // false: there is nothing to try in this direction
  void turn();                           // to the other direction, or else to the next axis

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

class Autotune {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // `spans_hosts`: whether the world does. `buffer_bytes`: of a staging buffer, which bounds a
  // chunk. A log that cannot be written is warned of; what was in the file is overwritten.
  Autotune(const Config& config, bool spans_hosts, std::uint64_t buffer_bytes);

  // The round runs next. Returns settings that all ranks are to change to; for good when the
  // search is over.
  std::optional<NewTunables> retune(const Round& round, TimePoint now);
  // Says what was found so far, where the search is not over.
  void world_ended();

 private:
  std::optional<NewTunables> weigh(const Sample& sample);
  std::vector<TuningAxis> axes_for(const Sample& sample) const;
  // Writes a line of JSON: these members, then the settings that they are about.
  void write(const std::string& event, const std::string& members, const Tunables& tunables);
  void log_sample(const Sample& sample);
  void log_duel(const Duel& duel, bool final);
  void announce_result();
  std::string summary() const;

  const bool spans_hosts_;
  const std::uint64_t buffer_bytes_;
  const int most_trials_;
  const Tunables start_;
  StepSampler sampler_;
  std::ofstream log_;
  Tunables current_;    // The rounds that are observed run with them.
  bool asked_ = false;  // for others, which do not hold yet
  std::int64_t warmup_left_;
  std::optional<TuningSearch> search_;  // from the end of the warm-up on
  int samples_ = 0;
  bool done_ = false;
};

}  // namespace hvdlite
