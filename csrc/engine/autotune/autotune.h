// Searches faster settings while a job trains: on rank 0, from the rounds that it runs.
//
// The engine shows it every round and lets the coordinator tell all ranks what it asks for, in band
// with the responses, so that every rank changes between the same two rounds (Round::tunables).
// The step in which that happens counts for no sample. The search is tuning_search.h's, a sample is
// step_sampler.h's. When it is over, or the world ends before, one line on standard error says what
// was found. Thread: the runner of rank 0's engine. No errors.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/config.h"
#include "engine/autotune/step_sampler.h"
#include "engine/autotune/tuning_log.h"
#include "engine/autotune/tuning_search.h"
#include "engine/entry.h"

namespace hvdlite {

class Autotune {
 public:
  using TimePoint = StepSampler::TimePoint;

  // Whether the world spans hosts, and the bytes of a staging slot, which bound a chunk.
  Autotune(const Config& config, bool spans_hosts, std::uint64_t slot_bytes);
  ~Autotune();  // says what was found so far, where the search is not over

  // A round is about to run. The settings that all ranks shall change to, if others than now.
  std::optional<Tunables> observe(const Round& round, TimePoint now);
  // The search is over; the last settings that were asked for stay.
  bool done() const { return done_; }

 private:
  std::optional<Tunables> take(const Sample& sample);
  const char* phase() const;
  std::vector<TuningAxis> axes_for(const Sample& sample) const;
  void report();
  std::string summary() const;

  const bool spans_hosts_;
  const std::uint64_t slot_bytes_;
  const int most_trials_;
  const Tunables start_;
  StepSampler sampler_;
  TuningLog log_;
  Tunables current_;    // of the rounds that are observed
  bool asked_ = false;  // for others, which do not hold yet
  std::int64_t warmup_left_;
  std::unique_ptr<TuningSearch> search_;  // from the end of the warm-up on
  int samples_ = 0;
  bool done_ = false;
};

}  // namespace hvdlite
