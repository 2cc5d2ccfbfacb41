#include "engine/autotune/autotune.h"

#include <algorithm>
#include <bit>
#include <cstdio>

#include "base/log.h"
#include "base/text.h"

namespace hvdlite {
namespace {

constexpr int kRank = 0;
constexpr std::int64_t kLeastThreshold = 256 << 10;
constexpr std::int64_t kLeastChunk = 64 << 10;
constexpr std::int64_t kLeastSmall = 4 << 10;

// "HVDLITE_SHM_CHUNK=1048576": what differs from the start, to be set for the next job.
std::string assignments(const Tunables& start, const Tunables& found) {
  std::string text;
  for (const Tunable& one : kTunables) {
    if (start.*one.field == found.*one.field) continue;
    const auto named = [&](const Knob& row) { return row.name == one.name; };
    const auto row = std::find_if(knobs().begin(), knobs().end(), named);
    text += (text.empty() ? "" : " ") + row->environment + "=" + std::to_string(found.*one.field);
  }
  return text;
}

std::string percent(double share) { return text_of_fixed(100 * share, 1) + " %"; }

}  // namespace

Autotune::Autotune(const Config& config, bool spans_hosts, std::uint64_t slot_bytes)
    : spans_hosts_(spans_hosts),
      slot_bytes_(slot_bytes),
      most_trials_(static_cast<int>(config.autotune_trials)),
      start_(tunables_of(config)),
      sampler_(
          static_cast<std::size_t>(std::max<std::int64_t>(config.autotune_steps_per_sample, 1))),
      log_(config.autotune_log),
      current_(start_),
      warmup_left_(config.autotune_warmup_samples) {}

Autotune::~Autotune() {
  if (!done_) report();
}

std::optional<Tunables> Autotune::observe(const Round& round, TimePoint now) {
  if (round.tunables) {
    current_ = *round.tunables;
    asked_ = false;
    sampler_.restart();
  }
  if (done_ || asked_) return std::nullopt;
  const std::optional<Sample> sample = sampler_.add(round.entries, now);
  return sample ? take(*sample) : std::nullopt;
}

std::optional<Tunables> Autotune::take(const Sample& sample) {
  const bool warming_up = warmup_left_-- > 0;
  if (!warming_up && search_ == nullptr) {
    search_ = std::make_unique<TuningSearch>(start_, axes_for(sample), most_trials_);
  }
  log_.sample(++samples_, phase(), sample, current_);
  if (warming_up) return std::nullopt;
  const bool final = search_->phase() == TuningSearch::Phase::kChecking;
  search_->record(sample.rate);
  if (search_->ended()) log_.duel(*search_->ended(), final);
  if (search_->phase() == TuningSearch::Phase::kDone) {
    report();
    done_ = true;
  }
  if (search_->to_measure() == current_) return std::nullopt;
  asked_ = true;
  return search_->to_measure();
}

const char* Autotune::phase() const {
  if (search_ == nullptr) return "warmup";
  return search_->phase() == TuningSearch::Phase::kTrying ? "trial" : "check";
}

std::vector<TuningAxis> Autotune::axes_for(const Sample& sample) const {
  // No batch is larger than a step, no chunk larger than a slot.
  const std::uint64_t step = std::bit_ceil(sample.largest_step);
  const auto most = static_cast<std::int64_t>(step);
  const auto most_staged = static_cast<std::int64_t>(std::min(step, slot_bytes_));
  std::vector<TuningAxis> axes = {{&Tunables::fusion_threshold, kLeastThreshold, most}};
  if (!sample.host) return axes;
  if (spans_hosts_) {
    axes.push_back({&Tunables::tcp_chunk, kLeastChunk, most_staged});
  } else {
    axes.push_back({&Tunables::shm_chunk, kLeastChunk, most_staged});
    axes.push_back({&Tunables::shm_small, kLeastSmall, most_staged});
  }
  return axes;
}

void Autotune::report() {
  announce(kRank, "autotune: " + summary());
  const bool searched = search_ != nullptr;
  log_.result(searched && search_->phase() == TuningSearch::Phase::kDone, samples_,
              searched ? search_->trials() : 0, searched ? search_->gain() : 0,
              searched ? search_->best() : start_);
}

std::string Autotune::summary() const {
  if (search_ == nullptr) {
    return "the job ended during the warm-up, after " + std::to_string(samples_) +
           " samples: nothing was tried";
  }
  const std::string effort =
      std::to_string(samples_) + " samples of " + std::to_string(search_->trials()) + " candidates";
  const std::string found = assignments(start_, search_->best());
  if (search_->phase() != TuningSearch::Phase::kDone) {
    return "the job ended before the search, after " + effort +
           "; best so far, not checked yet: " + (found.empty() ? "what the job began with" : found);
  }
  if (found.empty()) return "what the job began with stays: no better in " + effort;
  return found + " is " + percent(search_->gain()) + " faster than what the job began with (" +
         effort + ") and stays";
}

}  // namespace hvdlite
