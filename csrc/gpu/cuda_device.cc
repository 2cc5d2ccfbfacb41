#include "gpu/cuda_device.h"

#include <algorithm>
#include <bit>

namespace hvdlite {
namespace {

// What devices that are gone have left for later ones of the same GPU.
struct Left {
  std::shared_ptr<const CudaApi> api;
  int ordinal;
  CudaContext context;
  CudaStream stream;
};

struct Stock {
  Mutex mutex;
  std::vector<Left> all HVDLITE_GUARDED_BY(mutex);
};

Stock& stock() {
  static auto* const kStock = new Stock;  // Never destroyed: the process may end meanwhile.
  return *kStock;
}

}  // namespace

CudaEvent::~CudaEvent() { device_->recycle(handle_, use_); }

bool CudaEvent::reached() const {
  const CudaDevice::Current current(*device_);
  return device_->api().event_query(handle_) != kCudaNotReady;
}

Result<std::int64_t> CudaEvent::nanoseconds_after(const CudaEvent& earlier) const {
  const CudaDevice::Current current(*device_);
  float milliseconds = 0;
  HVDLITE_RETURN_IF_ERROR(device_->check(
      device_->api().event_elapsed(&milliseconds, earlier.handle_, handle_), "measuring time"));
  return static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6);
}

CudaDevice::Current::Current(const CudaDevice& device) : api_(device.api()) {
  if (api_.context_current(&before_) == kCudaSuccess && before_ == device.context_) return;
  changed_ = api_.context_make_current(device.context_) == kCudaSuccess;
}

CudaDevice::Current::~Current() {
  if (changed_) (void)api_.context_make_current(before_);
}

Result<std::shared_ptr<CudaDevice>> CudaDevice::open(std::shared_ptr<const CudaApi> api,
                                                     int ordinal) {
  if (ordinal < 0 || ordinal >= api->devices) {
    return Status(StatusCode::kInvalidArgument, "there is no GPU " + std::to_string(ordinal) +
                                                    "; this process sees " +
                                                    std::to_string(api->devices));
  }
  const std::shared_ptr<CudaDevice> device(new CudaDevice(std::move(api), ordinal));
  HVDLITE_RETURN_IF_ERROR(device->start());
  return device;
}

Status CudaDevice::start() {
  int processors = 0;
  HVDLITE_RETURN_IF_ERROR(check(api_->device_get(&device_, ordinal_), "finding the device"));
  HVDLITE_RETURN_IF_ERROR(check(api_->device_uuid(&uuid_, device_), "reading its identity"));
  HVDLITE_RETURN_IF_ERROR(
      check(api_->device_attribute(&processors, kCudaMultiprocessorCount, device_),
            "counting its processors"));
  processors_ = processors < 1 ? 1 : static_cast<unsigned>(processors);
  {
    MutexLock lock(stock().mutex);
    std::vector<Left>& all = stock().all;
    const auto same = std::find_if(all.begin(), all.end(), [this](const Left& left) {
      return left.ordinal == ordinal_ && left.api->stream_create == api_->stream_create;
    });
    if (same != all.end()) {
      context_ = same->context;
      stream_ = same->stream;
      all.erase(same);
      return Status();
    }
  }
  HVDLITE_RETURN_IF_ERROR(check(api_->context_retain(&context_, device_), "opening its context"));
  const Current current(*this);
  int least = 0;
  int greatest = 0;
  // The highest priority: communication goes before computation when both want the device's
  // processors.
  (void)api_->priority_range(&least, &greatest);
  return check(api_->stream_create(&stream_, kCudaStreamNonBlocking, greatest), "making a stream");
}

CudaDevice::~CudaDevice() {
  if (context_ == nullptr) return;
  {
    const Current current(*this);
    for (const auto& spares : spare_events_) {
      for (CudaEventHandle event : spares) (void)api_->event_destroy(event);
    }
  }
  if (stream_ == nullptr) {
    (void)api_->context_release(device_);
    return;
  }
  MutexLock lock(stock().mutex);
  stock().all.push_back({api_, ordinal_, context_, stream_});
}

std::string CudaDevice::describe() const { return "GPU " + std::to_string(ordinal_); }

Result<CudaEventPtr> CudaDevice::record(CudaStream stream, CudaEvent::Use use) {
  const Current current(*this);
  CudaEventHandle handle = nullptr;
  {
    MutexLock lock(mutex_);
    std::vector<CudaEventHandle>& spares = spare_events_[static_cast<std::size_t>(use)];
    if (!spares.empty()) {
      handle = spares.back();
      spares.pop_back();
    }
  }
  if (handle == nullptr) {
    const unsigned flags = use == CudaEvent::Use::kOrder ? kCudaEventDisableTiming : 0;
    HVDLITE_RETURN_IF_ERROR(check(api_->event_create(&handle, flags), "making an event"));
  }
  auto event = std::make_shared<CudaEvent>(shared_from_this(), handle, use);
  HVDLITE_RETURN_IF_ERROR(check(api_->event_record(handle, stream), "recording an event"));
  return event;
}

Status CudaDevice::wait(CudaStream stream, const CudaEvent& event) const {
  const Current current(*this);
  return check(api_->stream_wait(stream, event.handle(), 0), "waiting for an event");
}

void CudaDevice::settle() const {
  const Current current(*this);
  (void)api_->context_synchronize();
}

Status CudaDevice::zero(CudaPointer memory, std::size_t bytes) const {
  const Current current(*this);
  return check(api_->fill(memory, 0, bytes, stream_), "filling memory");
}

Result<DeviceMemory> CudaDevice::allocate(std::size_t bytes) {
  const Current current(*this);
  CudaPointer address = 0;
  HVDLITE_RETURN_IF_ERROR(check(api_->memory_allocate(&address, bytes),
                                "allocating " + std::to_string(bytes) + " bytes"));
  return DeviceMemory(address, bytes, [self = shared_from_this()](CudaPointer memory) {
    const Current freeing(*self);
    (void)self->api().memory_free(memory);
  });
}

Status CudaDevice::check(int error, const std::string& what) const {
  // The text is made only after an error.
  return error == kCudaSuccess ? Status() : api_->check(error, describe() + ": " + what);
}

void CudaDevice::recycle(CudaEventHandle event, CudaEvent::Use use) {
  MutexLock lock(mutex_);
  spare_events_[static_cast<std::size_t>(use)].push_back(event);
}

namespace {

constexpr std::size_t kSmallest = 4096;

}  // namespace

Result<DeviceMemory> DeviceMemoryPool::take(std::size_t bytes) {
  const std::size_t rounded = std::bit_ceil(std::max(bytes, kSmallest));
  Spare found;
  {
    MutexLock lock(mutex_);
    for (auto at = spares_.begin(); at != spares_.end(); ++at) {
      if (at->memory.bytes() != rounded) continue;
      found = std::move(*at);
      spares_.erase(at);
      break;
    }
  }
  if (!found.memory.valid()) return device_->allocate(rounded);
  HVDLITE_RETURN_IF_ERROR(device_->wait(device_->stream(), *found.after));
  return std::move(found.memory);
}

void DeviceMemoryPool::give_back(DeviceMemory memory, CudaEventPtr after) {
  std::list<Spare> dropped;  // freed after the lock is released
  MutexLock lock(mutex_);
  spares_.push_front({std::move(memory), std::move(after)});
  if (spares_.size() > most_spares_) dropped.splice(dropped.end(), spares_, --spares_.end());
}

}  // namespace hvdlite
