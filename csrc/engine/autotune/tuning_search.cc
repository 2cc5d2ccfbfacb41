#include "engine/autotune/tuning_search.h"

#include <algorithm>
#include <utility>

namespace hvdlite {

void Duel::record(double rate) {
  rates.push_back(rate);
  if (rates.size() < 2) return;
  const bool candidate_first = ratios.size() % 2 == 1;
  const double theirs = rates[candidate_first ? 0 : 1];
  const double defending = rates[candidate_first ? 1 : 0];
  rates.clear();
  ratios.push_back(defending > 0 ? theirs / defending : 1.0);
  ++(ratios.back() >= 1 + TuningSearch::kMargin ? wins : losses);
}

double Duel::gain() const {
  if (ratios.empty()) return 0;
  std::vector<double> sorted = ratios;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>((sorted.size() - 1) / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle - 1;
}

TuningSearch::TuningSearch(const Tunables& start, std::vector<TuningAxis> axes, int most_trials)
    : start_(start), axes_(std::move(axes)), most_trials_(most_trials), incumbent_(start) {
  propose();
}

const Tunables& TuningSearch::to_measure() const {
  if (phase_ == Phase::kDone) return incumbent_;
  return duel_.candidate_is_next() ? duel_.candidate : duel_.defender;
}

void TuningSearch::record(double rate) {
  ended_.reset();
  if (phase_ == Phase::kDone) return;
  duel_.record(rate);
  if (!duel_.over()) return;
  ended_ = duel_;
  if (phase_ == Phase::kTrying) {
    end_trial(duel_.won());
    return;
  }
  if (duel_.won()) {
    gain_ = duel_.gain();
  } else {
    incumbent_ = start_;
  }
  phase_ = Phase::kDone;
}

void TuningSearch::begin_duel(const Tunables& candidate, const Tunables& defender, int wins,
                              int losses) {
  duel_ = {};
  duel_.candidate = candidate;
  duel_.defender = defender;
  duel_.wins_needed = wins;
  duel_.losses_allowed = losses;
}

void TuningSearch::end_trial(bool won) {
  ++trials_;
  if (won) {
    incumbent_ = duel_.candidate;
    moved_ = true;
    settled_ = 0;
  } else {
    turn();
  }
  propose();
}

void TuningSearch::turn() {
  if (upwards_ && !moved_) {
    upwards_ = false;
    return;
  }
  ++settled_;
  axis_ = (axis_ + 1) % axes_.size();
  upwards_ = true;
  moved_ = false;
}

void TuningSearch::propose() {
  while (settled_ < axes_.size() && trials_ < most_trials_) {
    Tunables candidate = incumbent_;
    if (step(candidate)) return begin_duel(candidate, incumbent_, kTrialWins, kTrialWins);
    turn();
  }
  end_search();
}

bool TuningSearch::step(Tunables& candidate) const {
  const TuningAxis& axis = axes_[axis_];
  std::int64_t& value = candidate.*axis.knob;
  if (upwards_) {
    if (value >= axis.plateau) return false;
    value *= kFactor;
  } else {
    value = std::min(value, axis.plateau) / kFactor;
  }
  return value >= axis.least;
}

void TuningSearch::end_search() {
  if (incumbent_ == start_) {
    phase_ = Phase::kDone;
    return;
  }
  phase_ = Phase::kChecking;
  begin_duel(incumbent_, start_, kFinalWins, kFinalLosses);
}

}  // namespace hvdlite
