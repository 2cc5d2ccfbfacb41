#include "engine/autotune.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <locale>
#include <sstream>
#include <utility>

#include "base/text.h"

namespace hvdlite {
namespace {

constexpr int kRank = 0;
constexpr std::size_t kMostSeen = 1 << 16;  // in a step; without repetitions there are no steps
constexpr std::int64_t kLeastThreshold = 256 << 10;
constexpr std::int64_t kLeastChunk = 64 << 10;
constexpr std::int64_t kLeastSmall = 4 << 10;

bool counts(const Request& request) {
  return request.kind == Kind::kAllreduce && request.process_set == 0;
}

bool on_host(const Request& request) {
  return std::any_of(request.tensors.begin(), request.tensors.end(),
                     [](const auto& tensor) { return tensor.device == DeviceType::kHost; });
}

// What comes again with every step. Names that are used once never do; of those, two requests of
// the same size end a step.
std::string mark_of(const Request& request) {
  if (!request.name.starts_with('#')) return request.name;
  return "#" + std::to_string(request.wire_bytes());
}

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

// A member of a JSON object. Rates and ratios are finite, as JSON's numbers are.
template <typename T>
std::string member(const std::string& name, const T& value) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << std::boolalpha << ", \"" << name << "\": " << value;
  return text.str();
}

}  // namespace

std::optional<Sample> StepSampler::add(const std::vector<Agreed>& round, TimePoint now) {
  const bool ends = std::any_of(round.begin(), round.end(), [&](const Agreed& agreed) {
    const Request& request = agreed.entry->request;
    return counts(request) && seen_.contains(mark_of(request));
  });
  std::optional<Sample> sample = ends ? end_step(now) : std::nullopt;
  if (seen_.size() > kMostSeen) {
    seen_.clear();
    running_ = false;  // It is not a step.
  }
  for (const Agreed& agreed : round) {
    const Request& request = agreed.entry->request;
    if (!counts(request)) continue;
    seen_.insert(mark_of(request));
    bytes_ += request.wire_bytes();
    sample_.host = sample_.host || on_host(request);
  }
  return sample;
}

std::optional<Sample> StepSampler::end_step(TimePoint now) {
  seen_.clear();
  const double seconds = std::chrono::duration<double>(now - begin_).count();
  if (running_ && bytes_ > 0 && seconds > 0) {
    rates_.push_back(static_cast<double>(bytes_) / seconds);
    sample_.bytes += bytes_;
    sample_.seconds += seconds;
    sample_.largest_step = std::max(sample_.largest_step, bytes_);
  }
  running_ = true;
  begin_ = now;
  bytes_ = 0;
  if (rates_.size() < steps_ || sample_.seconds < kShortestSample) return std::nullopt;
  const auto middle = rates_.begin() + static_cast<std::ptrdiff_t>(rates_.size() / 2);
  std::nth_element(rates_.begin(), middle, rates_.end());
  sample_.rate = *middle;
  sample_.steps = rates_.size();
  rates_.clear();
  return std::exchange(sample_, {});
}

void StepSampler::restart() {
  running_ = false;
  bytes_ = 0;
  rates_.clear();
  sample_ = {};
}

void Duel::record(double rate) {
  (candidate_is_next() ? candidate_rate : defender_rate) = rate;
  if (++samples % 2 == 1) return;
  ratios.push_back(defender_rate > 0 ? candidate_rate / defender_rate : 1.0);
  ++(ratios.back() >= 1 + kMargin ? wins : losses);
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
  if (phase_ == Phase::kChecking) {
    phase_ = Phase::kDone;
    if (duel_.won()) gain_ = duel_.gain();
    if (!duel_.won()) incumbent_ = start_;
    return;
  }
  ++trials_;
  if (duel_.won()) {
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
  for (; settled_ < axes_.size() && trials_ < most_trials_; turn()) {
    Tunables candidate = incumbent_;
    if (!step(candidate)) continue;
    duel_ = {candidate, incumbent_, kTrialWins, kTrialWins};
    return;
  }
  phase_ = incumbent_ == start_ ? Phase::kDone : Phase::kChecking;
  duel_ = {incumbent_, start_, kFinalWins, kFinalLosses};
}

bool TuningSearch::step(Tunables& candidate) const {
  const TuningAxis& axis = axes_[axis_];
  std::int64_t& value = candidate.*axis.knob;
  if (upwards_ && value >= axis.plateau) return false;
  value = upwards_ ? value * kFactor : std::min(value, axis.plateau) / kFactor;
  return value >= axis.least;
}

Autotune::Autotune(const Config& config, bool spans_hosts, std::uint64_t buffer_bytes)
    : spans_hosts_(spans_hosts),
      buffer_bytes_(buffer_bytes),
      most_trials_(static_cast<int>(config.autotune_trials)),
      start_(tunables_of(config)),
      sampler_(
          static_cast<std::size_t>(std::max<std::int64_t>(config.autotune_steps_per_sample, 1))),
      current_(start_),
      warmup_left_(config.autotune_warmup_samples) {
  if (config.autotune_log.empty()) return;
  errno = 0;
  log_.open(config.autotune_log, std::ios::trunc);
  if (log_.is_open()) return;
  log(LogLevel::kWarning, kRank,
      "autotune goes on without a log: it cannot write " + config.autotune_log + " (" +
          std::strerror(errno) + ")");
}

void Autotune::world_ended() {
  if (!done_) announce_result();
  done_ = true;
}

std::optional<NewTunables> Autotune::retune(const Round& round, TimePoint now) {
  if (done_) return std::nullopt;
  if (round.tunables) {
    current_ = *round.tunables;
    asked_ = false;
    sampler_.restart();
  }
  if (asked_) return std::nullopt;
  const std::optional<Sample> sample = sampler_.add(round.entries, now);
  return sample ? weigh(*sample) : std::nullopt;
}

std::optional<NewTunables> Autotune::weigh(const Sample& sample) {
  const bool warming_up = warmup_left_-- > 0;
  if (!warming_up && !search_) search_.emplace(start_, axes_for(sample), most_trials_);
  ++samples_;
  log_sample(sample);
  if (warming_up) return std::nullopt;
  const bool final = search_->phase() == TuningSearch::Phase::kChecking;
  search_->record(sample.rate);
  if (search_->ended()) log_duel(*search_->ended(), final);
  if (search_->phase() == TuningSearch::Phase::kDone) {
    announce_result();
    done_ = true;
  }
  if (!done_ && search_->to_measure() == current_) return std::nullopt;
  asked_ = true;
  return NewTunables{search_->to_measure(), /*settled=*/done_};
}

std::vector<TuningAxis> Autotune::axes_for(const Sample& sample) const {
  // No batch is larger than a step, no chunk larger than a buffer.
  const std::uint64_t step = std::bit_ceil(sample.largest_step);
  const auto most = static_cast<std::int64_t>(step);
  const auto most_staged = static_cast<std::int64_t>(std::min(step, buffer_bytes_));
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

void Autotune::write(const std::string& event, const std::string& members,
                     const Tunables& tunables) {
  if (!log_.is_open()) return;
  log_ << "{\"event\": \"" << event << '"' << members;
  for (const Tunable& one : kTunables) log_ << member(one.name, tunables.*one.field);
  log_ << "}\n" << std::flush;
}

void Autotune::log_sample(const Sample& sample) {
  const bool checks = search_ && search_->phase() == TuningSearch::Phase::kChecking;
  const std::string phase = !search_ ? "\"warmup\"" : checks ? "\"check\"" : "\"trial\"";
  write("sample",
        member("sample", samples_) + member("phase", phase) + member("steps", sample.steps) +
            member("bytes", sample.bytes) + member("seconds", sample.seconds) +
            member("bytes_per_second", sample.rate),
        current_);
}

void Autotune::log_duel(const Duel& duel, bool final) {
  write(final ? "check" : "trial",
        member("won", duel.won()) + member("wins", duel.wins) + member("losses", duel.losses) +
            member("gain", duel.gain()),
        duel.candidate);
}

void Autotune::announce_result() {
  announce(kRank, "autotune: " + summary());
  write("result",
        member("finished", search_ && search_->phase() == TuningSearch::Phase::kDone) +
            member("samples", samples_) + member("trials", search_ ? search_->trials() : 0) +
            member("gain", search_ ? search_->gain() : 0.0),
        search_ ? search_->best() : start_);
}

std::string Autotune::summary() const {
  if (!search_) {
    return "the job, or an epoch of it, ended during the warm-up, after " +
           std::to_string(samples_) + " samples: nothing was tried";
  }
  const std::string effort =
      std::to_string(samples_) + " samples of " + std::to_string(search_->trials()) + " candidates";
  const std::string found = assignments(start_, search_->best());
  if (search_->phase() != TuningSearch::Phase::kDone) {
    return "the job, or an epoch of it, ended before the search, after " + effort +
           "; best so far, not checked yet: " + (found.empty() ? "what the job began with" : found);
  }
  if (found.empty()) return "what the job began with stays: no better in " + effort;
  return found + " is " + text_of_fixed(100 * search_->gain(), 1) +
         " % faster than what the job began with (" + effort + ") and stays";
}

}  // namespace hvdlite
