// One GPU as the core uses it: its primary context (which the framework uses too), events, memory,
// and one *communication stream*, on which all communication of this device runs in one order.
//
// The communication stream does not synchronise with the default stream. It waits for other
// streams, and they wait for it, by events only. A device lives as long as its events and memory,
// which share its ownership. Any thread, except where a function says runner. A call leaves the
// thread's current context as it was. Errors are the driver's, with this device's name.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "gpu/cuda_api.h"

namespace hvdlite {

class CudaDevice;

// A point in the work of a stream. When its last holder lets go of it, the driver's event goes back
// to the device's stock.
class CudaEvent {
 public:
  enum class Use : std::uint8_t { kOrder, kTime };  // an event that measures time costs more
  CudaEvent(std::shared_ptr<CudaDevice> device, CudaEventHandle handle, Use use)
      : device_(std::move(device)), handle_(handle), use_(use) {}
  ~CudaEvent();
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  CudaDevice& device() const { return *device_; }
  CudaEventHandle handle() const { return handle_; }
  // False until the device has come to this point. After an error of the device it is true.
  bool reached() const;
  // The device's time between two points that are reached; both events are of Use::kTime. The
  // result is exact to about a microsecond over short times: the driver gives a float.
  Result<std::int64_t> nanoseconds_after(const CudaEvent& earlier) const;

 private:
  std::shared_ptr<CudaDevice> device_;
  CudaEventHandle handle_;
  Use use_;
};
using CudaEventPtr = std::shared_ptr<CudaEvent>;

// Owner of device memory, with the function that frees it.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(CudaPointer address, std::size_t bytes, std::function<void(CudaPointer)> free)
      : address_(address), bytes_(bytes), free_(std::move(free)) {}
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    std::swap(free_, other.free_);
    return *this;
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    if (free_) free_(address_);
  }
  CudaPointer address() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  bool valid() const { return address_ != 0; }

 private:
  CudaPointer address_ = 0;
  std::size_t bytes_ = 0;
  std::function<void(CudaPointer)> free_;
};

class CudaDevice : public std::enable_shared_from_this<CudaDevice> {
 public:
  // Opens the GPU of this number. kInvalidArgument when there is no such device.
  static Result<std::shared_ptr<CudaDevice>> open(std::shared_ptr<const CudaApi> api, int ordinal);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  // Makes the context current in this thread for as long as this object lives.
  class Current {
   public:
    explicit Current(const CudaDevice& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const CudaApi& api_;
    CudaContext before_ = nullptr;
    bool changed_ = false;
  };

  const CudaApi& api() const { return *api_; }
  int ordinal() const { return ordinal_; }
  const CudaUuid& uuid() const { return uuid_; }
  unsigned processors() const { return processors_; }
  // "GPU 1", for messages.
  std::string describe() const;
  // The communication stream. Only the runner gives it work. It exists until the process ends, and
  // later devices of the same GPU take it over: torch notes it with memory that it frees at any
  // time.
  CudaStream stream() const { return stream_; }

  // Marks the point that `stream` of this device has come to.
  Result<CudaEventPtr> record(CudaStream stream, CudaEvent::Use use = CudaEvent::Use::kOrder);
  // Makes later work of `stream` (of any device) wait for the event. The caller does not wait.
  Status wait(CudaStream stream, const CudaEvent& event) const;
  // Blocks until all work that any stream was given so far has ended, with or without an error.
  void settle() const;
  // Gives the communication stream the work of filling memory with zeros. Runner only.
  Status zero(CudaPointer memory, std::size_t bytes) const;
  // Allocates device memory. kOutOfMemory names the size.
  Result<DeviceMemory> allocate(std::size_t bytes);
  // OK, or the driver's error with `what` and this device.
  Status check(int error, const std::string& what) const;

 private:
  friend class CudaEvent;
  CudaDevice(std::shared_ptr<const CudaApi> api, int ordinal)
      : api_(std::move(api)), ordinal_(ordinal) {}
  Status start();
  void recycle(CudaEventHandle event, CudaEvent::Use use);

  const std::shared_ptr<const CudaApi> api_;
  const int ordinal_;
  int device_ = 0;  // the driver's handle of this device
  CudaUuid uuid_{};
  unsigned processors_ = 1;
  CudaContext context_ = nullptr;
  CudaStream stream_ = nullptr;
  Mutex mutex_;  // spare_events_ has a list for each use.
  std::array<std::vector<CudaEventHandle>, 2> spare_events_ HVDLITE_GUARDED_BY(mutex_);
};

// Device memory that is used again, because freeing memory stops the whole device. The runner takes
// memory; the thread that has used it last gives it back. Sizes are rounded up to powers of two.
// Any thread, except take(). The workspace of a device and what was taken share the pool.
//
// Results come in any size, so their pool bounds its spares by a number, kSparesOfResults. The
// inputs that an elastic job keeps have the same sizes in each step, one for each tensor that is
// reduced in place; there all memory is kept: it is at most what was in use at one time, size by
// size, and ends with the engine. A bound of 8 would allocate and free the rest of the tensors in
// each step.
class DeviceMemoryPool {
 public:
  static constexpr std::size_t kSparesOfResults = 8;
  static constexpr std::size_t kAllSpares = SIZE_MAX;

  DeviceMemoryPool(std::shared_ptr<CudaDevice> device, std::size_t most_spares)
      : device_(std::move(device)), most_spares_(most_spares) {}

  // Gives memory of at least `bytes`, ready for work on the communication stream. Runner only.
  // kOutOfMemory names the size.
  Result<DeviceMemory> take(std::size_t bytes);
  // Takes memory back; `after` is the point after its last use.
  void give_back(DeviceMemory memory, CudaEventPtr after);

 private:
  struct Spare {
    DeviceMemory memory;
    CudaEventPtr after;
  };
  const std::shared_ptr<CudaDevice> device_;
  const std::size_t most_spares_;  // the one that was given back first goes
  Mutex mutex_;
  std::list<Spare> spares_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
