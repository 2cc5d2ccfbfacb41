#include "cuda/stream.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "cuda/device.h"

namespace fakegpu {
namespace {

Handles<Stream>& streams() {
  static auto* all = new Handles<Stream>;  // outlives the streams' threads
  return *all;
}
std::atomic<int> created{0};

}  // namespace

std::chrono::steady_clock::time_point host_patience() {
  return std::chrono::steady_clock::now() +
         std::chrono::milliseconds(fake_option("FAKE_CUDA_TIMEOUT_MS", -1, 60000));
}

void die_waiting(const std::string& what) {
  std::fprintf(stderr, "fake_gpu: the host waits too long for %s\n", what.c_str());
  std::abort();
}

std::shared_ptr<Stream> Stream::start(int device, int index) {
  const bool slow = fake_option("FAKE_CUDA_SLOW_STREAM", device, -1) == index;
  const std::chrono::microseconds delay(slow ? fake_option("FAKE_CUDA_SLOW_US", device, 20000) : 0);
  std::shared_ptr<Stream> stream(new Stream(device, delay));
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
    const std::chrono::microseconds delay = delay_;
    mutex_.unlock();
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
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

bool Stream::idle() {
  hvdlite::MutexLock lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::wait_idle() {
  const auto patience = host_patience();
  hvdlite::MutexLock lock(mutex_);
  while (busy_ || !queue_.empty()) {
    if (!changed_.wait_until(mutex_, patience)) die_waiting("a stream");
  }
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

void Stream::delay(std::chrono::microseconds time) {
  hvdlite::MutexLock lock(mutex_);
  delay_ = time;
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
CUresult on_stream(const char* function, CUstream handle, Body&& body) {
  return in_context(function, [&](Device& device) -> CUresult {
    const std::shared_ptr<Stream> stream = stream_of(handle, device.ordinal);
    return stream != nullptr ? body(device, *stream) : CUDA_ERROR_INVALID_HANDLE;
  });
}

}  // namespace

FAKE_API CUresult cuStreamCreateWithPriority(CUstream* out, unsigned flags, int) {
  return in_context("cuStreamCreateWithPriority", [&](Device& device) -> CUresult {
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    *out = streams().add(Stream::start(device.ordinal, ++created));
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
  return on_stream("cuStreamSynchronize", handle, [&](Device& device, Stream& stream) -> CUresult {
    FAKE_COUNT(device, host_syncs, 1);
    stream.wait_idle();
    return device.sticky;
  });
}

FAKE_API CUresult cuCtxSynchronize() {
  return in_context("cuCtxSynchronize", [&](Device& device) -> CUresult {
    FAKE_COUNT(device, host_syncs, 1);
    wait_for_device(device.ordinal);
    return device.sticky;
  });
}

FAKE_API CUresult cuStreamQuery(CUstream handle) {
  return on_stream("cuStreamQuery", handle, [&](Device& device, Stream& stream) -> CUresult {
    FAKE_COUNT(device, queries, 1);
    return stream.idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

FAKE_API CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  return on_stream("cuStreamGetCtx", handle, [&](Device&, Stream& stream) -> CUresult {
    *context = device_at(stream.device());
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuStreamIsCapturing(CUstream handle, int* status) {
  return on_stream("cuStreamIsCapturing", handle, [&](Device&, Stream& stream) -> CUresult {
    *status = stream.capturing() ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

FAKE_API CUresult cuLaunchHostFunc(CUstream handle, void (*function)(void*), void* argument) {
  return on_stream("cuLaunchHostFunc", handle, [&](Device& device, Stream& stream) -> CUresult {
    FAKE_COUNT(device, host_functions, 1);
    stream.put([function, argument] {
      const HostFunctionScope scope;
      function(argument);
    });
    return CUDA_SUCCESS;
  });
}

FAKE_API int fake_put(void* handle, int device, void (*work)(void*), void* argument) {
  const std::shared_ptr<Stream> stream = stream_of(handle, device);
  if (stream == nullptr || stream->device() != device) return CUDA_ERROR_INVALID_HANDLE;
  if (is_default(handle)) FAKE_COUNT(*device_at(device), default_stream_work, 1);
  stream->put([work, argument] { work(argument); });
  return CUDA_SUCCESS;
}

FAKE_API bool fake_delay_stream(void* handle, unsigned microseconds) {
  const std::shared_ptr<Stream> stream = stream_of(handle, fake_current_device());
  if (stream != nullptr) stream->delay(std::chrono::microseconds(microseconds));
  return stream != nullptr;
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
