#include "gpu/gpu_plane.h"

#include <algorithm>
#include <thread>

#include "base/text.h"

namespace hvdlite {

GpuPlane::GpuPlane(Backend& host, Fabric* fabric, Config config, GpuLibraries libraries)
    : fabric_(fabric),
      config_(std::move(config)),
      libraries_(std::move(libraries)),
      agreement_(host, fabric, config_, [this] { return nccl(); }) {}

GpuLibraries GpuLibraries::search(const Config& config, std::vector<std::string> nccl_folders) {
  return {[library = config.cuda_library] { return CudaApi::load(library); },
          [library = config.nccl_library, folders = std::move(nccl_folders)] {
            return NcclApi::load(library, folders);
          }};
}

GpuPlane::~GpuPlane() { abort(); }

Status GpuPlane::load_cuda() {
  if (cuda_ != nullptr) return Status();
  Result<std::shared_ptr<const CudaApi>> loaded = libraries_.cuda();
  HVDLITE_RETURN_IF_ERROR(loaded.status());
  cuda_ = std::move(loaded.value());
  return Status();
}

Result<std::shared_ptr<const NcclApi>> GpuPlane::nccl() {
  MutexLock lock(nccl_mutex_);
  if (nccl_ == nullptr) {
    Result<std::shared_ptr<const NcclApi>> loaded = libraries_.nccl();
    HVDLITE_RETURN_IF_ERROR(loaded.status());
    nccl_ = std::move(loaded.value());
    log(LogLevel::kInfo, fabric_->topology.rank,
        "NCCL " + nccl_version_text(nccl_->version) + " of " + nccl_->path + ", " + nccl_->origin);
  }
  return nccl_;
}

Result<DeviceWorkspace*> GpuPlane::workspace(int ordinal) {
  MutexLock lock(mutex_);
  HVDLITE_RETURN_IF_ERROR(load_cuda());
  std::unique_ptr<DeviceWorkspace>& place = workspaces_[ordinal];
  if (place == nullptr) {
    Result<std::unique_ptr<DeviceWorkspace>> opened = DeviceWorkspace::open(cuda_, ordinal);
    HVDLITE_RETURN_IF_ERROR(opened.status());
    place = std::move(opened.value());
  }
  return place.get();
}

Result<CudaEventPtr> GpuPlane::mark(std::uint32_t set, int ordinal, CudaStream stream) {
  const Result<DeviceWorkspace*> found = workspace(ordinal);
  HVDLITE_RETURN_IF_ERROR(found.status());
  CudaDevice& device = *found.value()->device;
  {
    MutexLock lock(mutex_);
    const int before = device_of_.try_emplace(set, ordinal).first->second;
    if (before != ordinal) {
      return Status(StatusCode::kInvalidArgument,
                    "it is on GPU " + std::to_string(ordinal) + ", but process set " +
                        std::to_string(set) + " has used GPU " + std::to_string(before) +
                        " on this rank; a process set has one device on each rank");
    }
  }
  int capturing = 0;
  {
    const CudaDevice::Current current(device);
    HVDLITE_RETURN_IF_ERROR(device.check(device.api().stream_capturing(stream, &capturing),
                                         "looking at the tensor's stream"));
  }
  if (capturing != 0) {
    return Status(StatusCode::kInvalidArgument,
                  "a CUDA graph is being captured; ranks negotiate each collective anew, so run "
                  "hvdlite's collectives outside of the graph");
  }
  return device.record(stream);
}

Result<int> GpuPlane::ordinal_of(const void* pointer) {
  MutexLock lock(mutex_);
  HVDLITE_RETURN_IF_ERROR(load_cuda());
  int ordinal = 0;
  const int error = pointer == nullptr
                        ? cuda_->context_device(&ordinal)
                        : cuda_->pointer_attribute(&ordinal, kCudaPointerOrdinal, address(pointer));
  HVDLITE_RETURN_IF_ERROR(cuda_->check(error, "finding the GPU of a tensor"));
  return ordinal;
}

Result<DeviceMemory> GpuPlane::allocate(int ordinal, std::size_t bytes) {
  const Result<DeviceWorkspace*> found = workspace(ordinal);
  HVDLITE_RETURN_IF_ERROR(found.status());
  return found.value()->pool->take(bytes);
}

std::shared_ptr<DeviceMemoryPool> GpuPlane::pool(int ordinal) {
  const Result<DeviceWorkspace*> found = workspace(ordinal);
  return found.ok() ? found.value()->pool : nullptr;
}

std::shared_ptr<DeviceMemoryPool> GpuPlane::pool_of_kept(int ordinal) {
  const Result<DeviceWorkspace*> found = workspace(ordinal);
  return found.ok() ? found.value()->kept : nullptr;
}

Result<GradientMemory::Holder> GpuPlane::allocate_gradient_memory(int ordinal, std::size_t bytes) {
  const Result<DeviceWorkspace*> found = workspace(ordinal);
  HVDLITE_RETURN_IF_ERROR(found.status());
  std::shared_ptr<const NcclApi> by;
  if (fabric_ != nullptr) {
    if (Result<std::shared_ptr<const NcclApi>> loaded = nccl(); loaded.ok()) by = loaded.value();
  }
  return found.value()->gradients->allocate(by, bytes);
}

void GpuPlane::free_gradient_memory() {
  if (busy()) return;
  std::vector<DeviceMemory> ended;
  {
    MutexLock lock(mutex_);
    for (const auto& [ordinal, workspace] : workspaces_) {
      if (!workspace->gradients->any_ended()) continue;
      for (DeviceMemory& memory : workspace->gradients->take_ended()) {
        ended.push_back(std::move(memory));
      }
    }
  }
  for (const DeviceMemory& memory : ended) {
    for (const auto& [key, plane] : planes_) plane.backend->forget_memory(memory.address());
  }
}

Result<DeviceBackend*> GpuPlane::open(const Group& group, int ordinal, Patience patience,
                                      bool part) {
  free_gradient_memory();
  const Planes::key_type key{group.id, group.ranks};
  if (const auto at = planes_.find(key); at != planes_.end()) return at->second.backend.get();
  const Result<DeviceWorkspace*> found = workspace(ordinal);
  HVDLITE_RETURN_IF_ERROR(found.status());
  Result<std::unique_ptr<DeviceBackend>> made = agreement_.make(group, *found.value(), patience);
  HVDLITE_RETURN_IF_ERROR(made.status());
  Plane& plane = planes_[key] = {std::move(made.value()), part};
  return plane.backend.get();
}

void GpuPlane::track(CudaEventPtr end) {
  if (fabric_ == nullptr) return;  // nobody to wait for
  under_way_.push_back({std::move(end), Deadline::after_knob(config_.collective_timeout)});
}

Status GpuPlane::poll() {
  while (!under_way_.empty() && under_way_.front().end->reached()) under_way_.pop_front();
  if (under_way_.empty()) {
    free_gradient_memory();
    return Status();
  }
  for (const auto& [key, plane] : planes_) HVDLITE_RETURN_IF_ERROR(plane.backend->poll());
  if (!under_way_.front().deadline.passed()) return Status();
  return Status(StatusCode::kTimeout,
                "a collective on " + under_way_.front().end->device().describe() +
                    " did not end within collective_timeout (a rank is stopped, or the computation "
                    "before it hangs on some rank)");
}

void GpuPlane::abort() {
  for (const auto& [key, plane] : planes_) plane.backend->abort();
  under_way_.clear();
}

void GpuPlane::settle(Deadline deadline) {
  while (busy() && poll().ok() && busy() && !deadline.passed()) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void GpuPlane::forget(const Group& group) {
  {
    MutexLock lock(mutex_);
    device_of_.erase(static_cast<std::uint32_t>(group.id));
  }
  end_planes([&](const auto& at) { return at.first.first == group.id; });
}

void GpuPlane::forget_parts() {
  end_planes([](const auto& at) { return at.second.part; });
}

void GpuPlane::end_planes(const std::function<bool(const Planes::value_type&)>& ends) {
  if (std::none_of(planes_.begin(), planes_.end(), ends)) return;
  const Deadline deadline = Deadline::after_knob(config_.collective_timeout);
  settle(deadline);
  for (auto& at : planes_) {
    if (!ends(at)) continue;
    busy() ? at.second.backend->abort() : at.second.backend->close(deadline);
  }
  std::erase_if(planes_, ends);
}

void GpuPlane::close(Deadline deadline) {
  settle(deadline);
  if (busy()) return abort();
  for (const auto& [key, plane] : planes_) plane.backend->close(deadline);
}

}  // namespace hvdlite
