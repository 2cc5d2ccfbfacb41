// How fast training goes, as the rounds of one rank show it: pure, with the clock as an argument.
//
// Words: a *step* ends when the name of an all-reduce comes a second time. Its *rate* is the bytes
// that the world's all-reduces carried in it, by the time from its first round to that of the next
// step; so the time in which the program computes counts. A *sample* is a run of steps; its rate is
// the median of theirs, which a pause in one of them does not move. Names that are used once never
// come again; of those, two of the same size end a step.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

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

  // A round begins at `now`. A sample when it ended just before.
  std::optional<Sample> add(const std::vector<Agreed>& round, TimePoint now);
  // Forgets the sample under way; the next one begins with the next step.
  void restart();

 private:
  bool ends_step(const std::vector<Agreed>& round) const;
  void end_step(TimePoint now);
  std::optional<Sample> take_sample();

  const std::size_t steps_;
  std::unordered_set<std::string> seen_;  // in this step
  bool running_ = false;                  // a step began within the sample
  TimePoint begin_;                       // of the step
  std::uint64_t bytes_ = 0;               // of the step
  std::vector<double> rates_;             // of the sample, by step
  Sample sample_;
};

}  // namespace hvdlite
