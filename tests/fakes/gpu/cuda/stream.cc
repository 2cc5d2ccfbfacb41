#include "cuda/stream.h"

#include <chrono>
#include <thread>

#include "cuda/device.h"

namespace fakegpu {
namespace {

// An event holds how often it was recorded, and which of these records a stream has reached.
class Event {
 public:
  Event(int device, bool timed) : device(device), timed(timed) {}
  // Counts one more record, and returns its number, for reached().
  std::uint64_t record() {
    hvdlite::MutexLock lock(mutex_);
    return ++recorded_;
  }
  std::uint64_t recorded() {
    hvdlite::MutexLock lock(mutex_);
    return recorded_;
  }
  void reached(std::uint64_t record) {
    hvdlite::MutexLock lock(mutex_);
    if (record > reached_) {
      reached_ = record;
      when_ = std::chrono::steady_clock::now();
    }
    changed_.notify_all();
  }
  bool done() {
    hvdlite::MutexLock lock(mutex_);
    return reached_ >= recorded_;
  }
  // The wait of a stream: for this record.
  void wait_for(std::uint64_t record) {
    hvdlite::MutexLock lock(mutex_);
    while (reached_ < record) changed_.wait(mutex_);
  }
  std::chrono::steady_clock::time_point when() {
    hvdlite::MutexLock lock(mutex_);
    return when_;
  }

  const int device;
  const bool timed;

 private:
  hvdlite::Mutex mutex_;
  hvdlite::Condition changed_;
  std::uint64_t recorded_ HVDLITE_GUARDED_BY(mutex_) = 0;
  std::uint64_t reached_ HVDLITE_GUARDED_BY(mutex_) = 0;
  std::chrono::steady_clock::time_point when_ HVDLITE_GUARDED_BY(mutex_);
};

Handles<Stream>& streams() {
  static auto* all = new Handles<Stream>;  // outlives the streams' threads
  return *all;
}

Handles<Event>& events() {
  static auto* all = new Handles<Event>;  // outlives the streams' threads
  return *all;
}

}  // namespace

std::shared_ptr<Stream> Stream::start(int device) {
  std::shared_ptr<Stream> stream(new Stream(device));
  // Detached, because a stream may be destroyed while its last operation is stuck.
  std::thread([stream] { stream->run(); }).detach();
  return stream;
}

void Stream::run() {
  mutex_.lock();
  while (true) {
    while (!closed_ && (queue_.empty() || held_)) changed_.wait(mutex_);
    if (queue_.empty()) break;
    const std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    mutex_.unlock();
    work();
    mutex_.lock();
    busy_ = false;
    changed_.notify_all();
  }
  mutex_.unlock();
}

void Stream::put(std::function<void()> work) {
  hvdlite::MutexLock lock(mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_all();
}

void Stream::wait_idle() {
  hvdlite::MutexLock lock(mutex_);
  while (busy_ || !queue_.empty()) changed_.wait(mutex_);
}

void Stream::close() {
  hvdlite::MutexLock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Stream::hold(bool held) {
  hvdlite::MutexLock lock(mutex_);
  held_ = held;
  changed_.notify_all();
}

void Stream::set_capturing(bool capturing) {
  hvdlite::MutexLock lock(mutex_);
  capturing_ = capturing;
}

bool Stream::capturing() {
  hvdlite::MutexLock lock(mutex_);
  return capturing_;
}

std::shared_ptr<Stream> stream_of(CUstream handle, int device) {
  if (is_default(handle)) {
    return device_at(device) != nullptr ? device_at(device)->default_stream() : nullptr;
  }
  return streams().find(handle);
}

void wait_for_device(int device) {
  device_at(device)->default_stream()->wait_idle();
  streams().for_each([device](const std::shared_ptr<Stream>& stream) {
    if (stream->device() == device) stream->wait_idle();
  });
}

}  // namespace fakegpu

using namespace fakegpu;

namespace {

// Runs `body(device, stream)` for a stream of the current context.
template <typename Body>
CUresult on_stream(CUstream handle, Body&& body) {
  return in_context([&](Device& device) -> CUresult {
    const std::shared_ptr<Stream> stream = stream_of(handle, device.ordinal);
    return stream != nullptr ? body(device, *stream) : CUDA_ERROR_INVALID_HANDLE;
  });
}

}  // namespace

FAKE_API CUresult cuStreamCreateWithPriority(CUstream* out, unsigned flags, int) {
  return in_context([&](Device& device) -> CUresult {
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    *out = streams().add(Stream::start(device.ordinal));
    FAKE_COUNT(device, live_streams, 1);
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuStreamCreate(CUstream* out, unsigned flags) {
  return cuStreamCreateWithPriority(out, flags, 0);
}

FAKE_API CUresult cuStreamDestroy_v2(CUstream handle) {
  const std::shared_ptr<Stream> stream = streams().remove(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  stream->close();
  FAKE_COUNT(*device_at(stream->device()), live_streams, -1);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuStreamSynchronize(CUstream handle) {
  return on_stream(handle, [&](Device& device, Stream& stream) -> CUresult {
    FAKE_COUNT(device, host_syncs, 1);
    stream.wait_idle();
    return device.sticky;
  });
}

FAKE_API CUresult cuCtxSynchronize() {
  return in_context([&](Device& device) -> CUresult {
    FAKE_COUNT(device, host_syncs, 1);
    wait_for_device(device.ordinal);
    return device.sticky;
  });
}

FAKE_API CUresult cuStreamIsCapturing(CUstream handle, int* status) {
  return on_stream(handle, [&](Device&, Stream& stream) -> CUresult {
    *status = stream.capturing() ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuEventCreate(CUevent* out, unsigned flags) {
  return in_context([&](Device& device) -> CUresult {
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
  return on_stream(stream_handle, [&](Device& device, Stream& stream) -> CUresult {
    const std::shared_ptr<Event> event = events().find(handle);
    if (event == nullptr || event->device != stream.device()) return CUDA_ERROR_INVALID_HANDLE;
    FAKE_COUNT(device, event_records, 1);
    const std::uint64_t record = event->record();
    stream.put([event, record] { event->reached(record); });
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned) {
  return on_stream(stream_handle, [&](Device&, Stream& stream) -> CUresult {
    const std::shared_ptr<Event> event = events().find(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const std::uint64_t record = event->recorded();
    stream.put([event, record] { event->wait_for(record); });
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuEventQuery(CUevent handle) {
  return in_context([&](Device&) -> CUresult {
    const std::shared_ptr<Event> event = events().find(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return event->done() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
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

FAKE_API int fake_put(void* handle, int device, void (*work)(void*), void* argument) {
  const std::shared_ptr<Stream> stream = stream_of(handle, device);
  if (stream == nullptr || stream->device() != device) return CUDA_ERROR_INVALID_HANDLE;
  if (is_default(handle)) FAKE_COUNT(*device_at(device), default_stream_work, 1);
  stream->put([work, argument] { work(argument); });
  return CUDA_SUCCESS;
}

FAKE_API bool fake_hold_stream(void* handle, bool held) {
  const std::shared_ptr<Stream> stream = stream_of(handle, fake_current_device());
  if (stream != nullptr) stream->hold(held);
  return stream != nullptr;
}

FAKE_API bool fake_set_capturing(void* handle, bool capturing) {
  const std::shared_ptr<Stream> stream = stream_of(handle, fake_current_device());
  if (stream != nullptr) stream->set_capturing(capturing);
  return stream != nullptr;
}
