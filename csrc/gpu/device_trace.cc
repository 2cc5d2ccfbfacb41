#include "gpu/device_trace.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace hvdlite {
namespace {

constexpr TraceTime kRenewAfter = 1'000'000'000;
// The trace takes names of rows as literals only.
constexpr const char* kRows[] = {"GPU 0",  "GPU 1",  "GPU 2",  "GPU 3",  "GPU 4",          "GPU 5",
                                 "GPU 6",  "GPU 7",  "GPU 8",  "GPU 9",  "GPU 10",         "GPU 11",
                                 "GPU 12", "GPU 13", "GPU 14", "GPU 15", "GPU 16 and more"};

}  // namespace

DeviceTrace::~DeviceTrace() {
  for (auto& [ordinal, clock] : clocks_) {
    const CudaDevice::Current current(*clock.device);
    (void)clock.device->api().stream_destroy(clock.stream);
  }
}

std::shared_ptr<const DeviceTrace::Reference> DeviceTrace::reference_of(CudaDevice& device) {
  const auto [at, is_new] = clocks_.try_emplace(device.ordinal());
  Clock& clock = at->second;
  if (is_new) {
    const CudaDevice::Current current(device);
    clock.device = device.shared_from_this();
    (void)device.api().stream_create(&clock.stream, kCudaStreamNonBlocking, 0);
  }
  if (clock.stream == nullptr) return nullptr;
  const TraceTime now = trace_now();
  if (clock.reference != nullptr && now - clock.reference->time < kRenewAfter) {
    return clock.reference;
  }
  Result<CudaEventPtr> event = device.record(clock.stream, CudaEvent::Use::kTime);
  if (!event.ok()) return nullptr;
  clock.reference = std::make_shared<Reference>(Reference{std::move(event.value()), trace_now()});
  return clock.reference;
}

void DeviceTrace::begin(CudaDevice& device) {
  write();
  current_ = {};
  if (!trace_.on()) return;
  current_.reference = reference_of(device);
  if (current_.reference == nullptr) return;
  Result<CudaEventPtr> event = device.record(device.stream(), CudaEvent::Use::kTime);
  if (event.ok()) current_.begin = std::move(event.value());
}

void DeviceTrace::end(std::string name, std::uint64_t bytes) {
  if (current_.begin == nullptr) return;
  CudaDevice& device = current_.begin->device();
  Result<CudaEventPtr> event = device.record(device.stream(), CudaEvent::Use::kTime);
  Span span = std::exchange(current_, {});
  if (!event.ok()) return;
  span.end = std::move(event.value());
  span.name = std::move(name);
  span.bytes = bytes;
  spans_.push_back(std::move(span));
}

void DeviceTrace::write() {
  while (!spans_.empty()) {
    const Span& next = spans_.front();
    if (!next.end->reached() || !next.reference->event->reached()) return;
    if (trace_.on()) write(next);
    spans_.pop_front();
  }
}

void DeviceTrace::write(const Span& span) {
  const Result<TraceTime> begin = span.begin->nanoseconds_after(*span.reference->event);
  const Result<TraceTime> end = span.end->nanoseconds_after(*span.reference->event);
  if (!begin.ok() || !end.ok()) return;
  const auto row = static_cast<std::size_t>(span.begin->device().ordinal());
  const TraceTime zero = span.reference->time;
  trace_.span(kRows[std::min(row, std::size(kRows) - 1)], span.name, zero + begin.value(),
              zero + end.value(), span.bytes);
}

}  // namespace hvdlite
