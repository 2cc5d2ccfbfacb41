#include "engine/autotune/step_sampler.h"

#include <algorithm>
#include <utility>

namespace hvdlite {
namespace {

bool counts(const Request& request) {
  return request.kind == Kind::kAllreduce && request.process_set == 0;
}

bool on_host(const Request& request) {
  return std::any_of(request.tensors.begin(), request.tensors.end(),
                     [](const auto& tensor) { return tensor.device == DeviceType::kHost; });
}

// What comes again with every step.
std::string mark_of(const Request& request) {
  if (!request.name.starts_with('#')) return request.name;
  return "#" + std::to_string(request.wire_bytes());
}

}  // namespace

std::optional<Sample> StepSampler::add(const std::vector<Agreed>& round, TimePoint now) {
  std::optional<Sample> sample;
  if (ends_step(round)) {
    end_step(now);
    sample = take_sample();
    seen_.clear();
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

bool StepSampler::ends_step(const std::vector<Agreed>& round) const {
  return std::any_of(round.begin(), round.end(), [&](const Agreed& agreed) {
    const Request& request = agreed.entry->request;
    return counts(request) && seen_.contains(mark_of(request));
  });
}

void StepSampler::end_step(TimePoint now) {
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
}

std::optional<Sample> StepSampler::take_sample() {
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

}  // namespace hvdlite
