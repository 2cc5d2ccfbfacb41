#include "cuda/device.h"
#include "cuda/stream.h"

namespace fakegpu {
namespace {

Handles<Event>& events() {
  static auto* all = new Handles<Event>;  // outlives the streams' threads
  return *all;
}

}  // namespace

std::uint64_t Event::record() {
  hvdlite::MutexLock lock(mutex_);
  return ++recorded_;
}

std::uint64_t Event::recorded() {
  hvdlite::MutexLock lock(mutex_);
  return recorded_;
}

void Event::reached(std::uint64_t record) {
  hvdlite::MutexLock lock(mutex_);
  if (record > reached_) {
    reached_ = record;
    when_ = std::chrono::steady_clock::now();
  }
  changed_.notify_all();
}

bool Event::done() {
  hvdlite::MutexLock lock(mutex_);
  return reached_ >= recorded_;
}

void Event::wait_for(std::uint64_t record) {
  hvdlite::MutexLock lock(mutex_);
  while (reached_ < record) changed_.wait(mutex_);
}

void Event::wait_on_host() {
  const auto patience = host_patience();
  hvdlite::MutexLock lock(mutex_);
  const std::uint64_t record = recorded_;
  while (reached_ < record) {
    if (!changed_.wait_until(mutex_, patience)) die_waiting("an event");
  }
}

std::chrono::steady_clock::time_point Event::when() {
  hvdlite::MutexLock lock(mutex_);
  return when_;
}

}  // namespace fakegpu

using namespace fakegpu;

FAKE_API CUresult cuEventCreate(CUevent* out, unsigned flags) {
  return in_context("cuEventCreate", [&](Device& device) -> CUresult {
    const bool timed = (flags & CU_EVENT_DISABLE_TIMING) == 0;
    *out = events().add(std::make_shared<Event>(device.ordinal, timed));
    FAKE_COUNT(device, live_events, 1);
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuEventDestroy_v2(CUevent handle) {
  const std::shared_ptr<Event> event = events().remove(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  FAKE_COUNT(*device_at(event->device), live_events, -1);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  return in_context("cuEventRecord", [&](Device& device) -> CUresult {
    const std::shared_ptr<Event> event = events().find(handle);
    const std::shared_ptr<Stream> stream = stream_of(stream_handle, device.ordinal);
    if (event == nullptr || stream == nullptr || event->device != stream->device()) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    FAKE_COUNT(device, event_records, 1);
    const std::uint64_t record = event->record();
    stream->put([event, record] { event->reached(record); });
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned) {
  return in_context("cuStreamWaitEvent", [&](Device& device) -> CUresult {
    const std::shared_ptr<Event> event = events().find(handle);
    const std::shared_ptr<Stream> stream = stream_of(stream_handle, device.ordinal);
    if (event == nullptr || stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    FAKE_COUNT(device, stream_waits, 1);
    const std::uint64_t record = event->recorded();
    stream->put([event, record] { event->wait_for(record); });
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuEventQuery(CUevent handle) {
  return in_context("cuEventQuery", [&](Device& device) -> CUresult {
    const std::shared_ptr<Event> event = events().find(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    FAKE_COUNT(device, queries, 1);
    return event->done() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

FAKE_API CUresult cuEventSynchronize(CUevent handle) {
  return in_context("cuEventSynchronize", [&](Device& device) -> CUresult {
    const std::shared_ptr<Event> event = events().find(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    FAKE_COUNT(device, host_syncs, 1);
    event->wait_on_host();
    return device.sticky;
  });
}

FAKE_API CUresult cuEventElapsedTime(float* milliseconds, CUevent from_handle, CUevent to_handle) {
  const std::shared_ptr<Event> from = events().find(from_handle);
  const std::shared_ptr<Event> to = events().find(to_handle);
  if (from == nullptr || to == nullptr || !from->timed || !to->timed) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!from->done() || !to->done()) return CUDA_ERROR_NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(to->when() - from->when()).count();
  return CUDA_SUCCESS;
}
