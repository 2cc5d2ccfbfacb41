#include "gpu/gpu_plane.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/text.h"
#include "gpu/cuda_api.h"
#include "gpu/device_backend.h"
#include "gpu/nccl_api.h"
#include "gpu/nccl_backend.h"

namespace hvdlite {

GpuPlane::GpuPlane(Backend& host, Fabric* fabric, Config config, GpuLibraries libraries)
    : host_(host), fabric_(fabric), config_(std::move(config)), libraries_(std::move(libraries)) {}

GpuLibraries GpuLibraries::search(const Config& config, std::vector<std::string> nccl_folders) {
  return {[library = config.cuda_library] { return CudaApi::load(library); },
          [library = config.nccl_library, folders = std::move(nccl_folders)] {
            return NcclApi::load(library, folders);
          }};
}

GpuPlane::~GpuPlane() { abort(); }

Status GpuPlane::load_cuda() {
  if (cuda_ != nullptr) return Status();
  HVDLITE_ASSIGN_OR_RETURN(cuda_, libraries_.cuda());
  return Status();
}

Result<std::shared_ptr<const NcclApi>> GpuPlane::nccl() {
  MutexLock lock(nccl_mutex_);
  if (nccl_ == nullptr) {
    HVDLITE_ASSIGN_OR_RETURN(nccl_, libraries_.nccl());
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
    HVDLITE_ASSIGN_OR_RETURN(place, DeviceWorkspace::open(cuda_, ordinal));
  }
  return place.get();
}

Result<CudaEventPtr> GpuPlane::mark(std::uint32_t set, int ordinal, CudaStream stream) {
  HVDLITE_ASSIGN_OR_RETURN(const auto found, workspace(ordinal));
  CudaDevice& device = *found->device;
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
  HVDLITE_ASSIGN_OR_RETURN(const auto found, workspace(ordinal));
  return found->pool->take(bytes);
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
  HVDLITE_ASSIGN_OR_RETURN(const auto found, workspace(ordinal));
  std::shared_ptr<const NcclApi> by;
  if (fabric_ != nullptr) {
    if (Result<std::shared_ptr<const NcclApi>> loaded = nccl(); loaded.ok()) by = loaded.value();
  }
  return found->gradients->allocate(by, bytes);
}

void GpuPlane::free_gradient_memory() {
  if (busy()) return;
  std::vector<DeviceMemory> ended;
  {
    MutexLock lock(mutex_);
    for (const auto& [ordinal, workspace] : workspaces_) {
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
  HVDLITE_ASSIGN_OR_RETURN(const auto found, workspace(ordinal));
  HVDLITE_ASSIGN_OR_RETURN(auto made, make(group, *found, patience));
  Plane& plane = planes_[key] = {std::move(made), part};
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

// A plain struct, because its bytes travel.
struct DeviceCandidate {
  std::int32_t rank = -1;
  std::int32_t nccl = 0;   // version; 0: cannot be used
  std::int32_t fused = 0;  // has a fusion buffer
  CudaUuid uuid{};
  char reason[256] = {};  // why NCCL cannot be used
};

namespace {

// The fusion threshold, and some more for the gaps between tensors.
std::size_t fusion_bytes(const Config& config) {
  constexpr std::int64_t kLeast = 4096;
  const auto threshold = static_cast<std::size_t>(std::max(config.fusion_threshold, kLeast));
  return threshold + threshold / 64;
}

Status invalid(const std::string& why) { return Status(StatusCode::kInvalidArgument, why); }

// Refuses versions of NCCL that differ.
Status one_nccl(const std::vector<DeviceCandidate>& members) {
  const DeviceCandidate& first = members.front();
  for (const DeviceCandidate& member : members) {
    if (member.nccl == first.nccl) continue;
    return invalid("NCCL " + nccl_version_text(first.nccl) + " on rank " +
                   std::to_string(first.rank) + " and " + nccl_version_text(member.nccl) +
                   " on rank " + std::to_string(member.rank) +
                   " do not work together; install the same version everywhere, or name one with "
                   "HVDLITE_NCCL_LIBRARY");
  }
  return Status();
}

// The text to add to an error of NCCL when two members share a GPU, which is the likely reason.
std::string one_gpu_for_two(const std::vector<DeviceCandidate>& members) {
  for (const DeviceCandidate& member : members) {
    for (const DeviceCandidate& other : members) {
      if (other.rank >= member.rank || !(other.uuid == member.uuid)) continue;
      return " [ranks " + std::to_string(other.rank) + " and " + std::to_string(member.rank) +
             " use the same GPU; call torch.cuda.set_device(hvd.local_rank()) before the first "
             "GPU tensor, and start at most as many ranks on a host as it has GPUs]";
    }
  }
  return "";
}

}  // namespace

Result<std::unique_ptr<DeviceBackend>> GpuPlane::make(const Group& group,
                                                      DeviceWorkspace& workspace,
                                                      Patience patience) {
  if (group.ranks.size() == 1) {
    return std::unique_ptr<DeviceBackend>(std::make_unique<SelfDeviceBackend>(workspace));
  }
  const DeviceCandidate own = present(workspace);
  std::vector<DeviceCandidate> members(group.ranks.size());
  const std::vector<std::size_t> bytes(members.size(), sizeof(DeviceCandidate));
  const Allgather call{group, std::as_bytes(std::span(&own, 1)), bytes,
                       std::as_writable_bytes(std::span(members))};
  HVDLITE_RETURN_IF_ERROR(host_.allgather(call, patience));
  const auto has_nccl = [](const DeviceCandidate& member) { return member.nccl > 0; };
  if (std::all_of(members.begin(), members.end(), has_nccl)) {
    return make_nccl(group, workspace, members, patience);
  }
  HVDLITE_RETURN_IF_ERROR(fall_back(group, members));
  return std::unique_ptr<DeviceBackend>(
      std::make_unique<StagedBackend>(workspace, host_, fabric_->topology.rank));
}

DeviceCandidate GpuPlane::present(DeviceWorkspace& workspace) {
  DeviceCandidate own;
  own.rank = fabric_->topology.rank;
  own.uuid = workspace.device->uuid();
  const Result<std::shared_ptr<const NcclApi>> loaded = nccl();
  if (!loaded.ok()) {
    std::strncpy(own.reason, loaded.status().message().c_str(), sizeof(own.reason) - 1);
    return own;
  }
  own.nccl = loaded.value()->version;
  const Status reserved = workspace.reserve_fusion(loaded.value(), fusion_bytes(config_));
  own.fused = reserved.ok() ? 1 : 0;
  if (!reserved.ok()) {
    log(LogLevel::kWarning, own.rank,
        "there is no fusion buffer on the GPU, so tensors travel one by one: " +
            reserved.message() +
            "; lower HVDLITE_FUSION_THRESHOLD or the memory that the framework takes");
  }
  return own;
}

Result<std::unique_ptr<DeviceBackend>> GpuPlane::make_nccl(
    const Group& group, DeviceWorkspace& workspace, const std::vector<DeviceCandidate>& members,
    Patience patience) {
  HVDLITE_RETURN_IF_ERROR(one_nccl(members));
  struct {
    NcclUniqueId id{};
    NcclResult result = NcclResult::kSuccess;
  } start;
  HVDLITE_ASSIGN_OR_RETURN(const auto api, nccl());  // present() has loaded it before
  const int root = group.ranks.front();
  if (fabric_->topology.rank == root) start.result = api->get_unique_id(&start.id);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(&start, 1));
  HVDLITE_RETURN_IF_ERROR(host_.broadcast({group, root, bytes, bytes}, patience));
  if (start.result != NcclResult::kSuccess) {
    return invalid("NCCL does not start on rank " + std::to_string(root) + ": " +
                   api->error_string(start.result) + "; run with NCCL_DEBUG=INFO");
  }
  const bool fused = std::all_of(members.begin(), members.end(),
                                 [](const DeviceCandidate& member) { return member.fused != 0; });
  Result<std::unique_ptr<NcclBackend>> connected =
      NcclBackend::connect(api, {group, *fabric_}, workspace, host_, start.id, fused, patience);
  if (!connected.ok()) {
    const Status why = connected.status();
    return Status(why.code(), why.message() + one_gpu_for_two(members), why.failed_rank());
  }
  return std::unique_ptr<DeviceBackend>(std::move(connected.value()));
}

Status GpuPlane::fall_back(const Group& group, const std::vector<DeviceCandidate>& members) {
  const auto lacking = std::find_if(members.begin(), members.end(),
                                    [](const DeviceCandidate& member) { return member.nccl == 0; });
  const std::string why = "NCCL cannot be used on rank " + std::to_string(lacking->rank) + ": " +
                          std::string(lacking->reason);
  if (config_.require_nccl != 0) return invalid(why + " (HVDLITE_REQUIRE_NCCL=1)");
  if (!warned_ && fabric_->topology.rank == group.ranks.front()) {
    log(LogLevel::kWarning, fabric_->topology.rank,
        "GPU tensors pass through the host, which is slow. " + why);
  }
  warned_ = true;
  return Status();
}

std::vector<LibraryReport> examine_gpus(const Config& config,
                                        std::span<const std::string> nccl_folders) {
  std::vector<LibraryReport> rows;
  const auto cuda = CudaApi::load(config.cuda_library);
  std::string text = cuda.status().message();
  if (cuda.ok()) {
    const CudaApi& api = *cuda.value();
    text = "CUDA " + cuda_version_text(api.version) + ", " + std::to_string(api.devices) +
           (api.devices == 1 ? " device, " : " devices, ") + api.path;
  }
  rows.push_back({"CUDA driver", cuda.ok(), text});
  const auto nccl = NcclApi::load(config.nccl_library, nccl_folders);
  text = nccl.status().message();
  if (nccl.ok()) {
    const NcclApi& api = *nccl.value();
    text = nccl_version_text(api.version) + ", " + api.path + " (" + api.origin + ")";
    if (api.version > kNewestNccl) text += ", newer than any version that was tested";
  }
  rows.push_back({"NCCL", nccl.ok(), text});
  return rows;
}

}  // namespace hvdlite
