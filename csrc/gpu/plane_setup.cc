#include "gpu/plane_setup.h"

#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "gpu/nccl_backend.h"
#include "gpu/self_device_backend.h"
#include "gpu/staged_backend.h"

namespace hvdlite {
namespace {

// The fusion threshold, and some more for the gaps between tensors.
std::size_t fusion_bytes(const Config& config) {
  constexpr std::int64_t kLeast = 4096;
  const auto threshold = static_cast<std::size_t>(std::max(config.fusion_threshold, kLeast));
  return threshold + threshold / 64;
}

Status invalid(const std::string& why) { return Status(StatusCode::kInvalidArgument, why); }

}  // namespace

// A plain struct, because its bytes travel.
struct DeviceAgreement::Candidate {
  std::int32_t rank = -1;
  std::int32_t nccl = 0;   // version; 0: cannot be used
  std::int32_t fused = 0;  // has a fusion buffer
  CudaUuid uuid{};
  char reason[256] = {};  // why NCCL cannot be used
};

Result<std::unique_ptr<DeviceBackend>> DeviceAgreement::make(const Group& group,
                                                             DeviceWorkspace& workspace,
                                                             Patience patience) {
  if (group.ranks.size() == 1) {
    return std::unique_ptr<DeviceBackend>(std::make_unique<SelfDeviceBackend>(workspace));
  }
  const Candidate own = present(workspace);
  std::vector<Candidate> members(group.ranks.size());
  const std::vector<std::size_t> bytes(members.size(), sizeof(Candidate));
  const Allgather call{group, std::as_bytes(std::span(&own, 1)), bytes,
                       std::as_writable_bytes(std::span(members))};
  HVDLITE_RETURN_IF_ERROR(host_.allgather(call, patience));
  const auto has_nccl = [](const Candidate& member) { return member.nccl > 0; };
  if (std::all_of(members.begin(), members.end(), has_nccl)) {
    return make_nccl(group, workspace, members, patience);
  }
  HVDLITE_RETURN_IF_ERROR(fall_back(group, members));
  return std::unique_ptr<DeviceBackend>(
      std::make_unique<StagedBackend>(workspace, host_, fabric_->topology.rank));
}

DeviceAgreement::Candidate DeviceAgreement::present(DeviceWorkspace& workspace) {
  Candidate own;
  own.rank = fabric_->topology.rank;
  own.uuid = workspace.device->uuid();
  const Result<std::shared_ptr<const NcclApi>> loaded = nccl_();
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

// Refuses versions of NCCL that differ.
Status DeviceAgreement::one_nccl(const std::vector<Candidate>& members) {
  const Candidate& first = members.front();
  for (const Candidate& member : members) {
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
std::string DeviceAgreement::one_gpu_for_two(const std::vector<Candidate>& members) {
  for (const Candidate& member : members) {
    for (const Candidate& other : members) {
      if (other.rank >= member.rank || !(other.uuid == member.uuid)) continue;
      return " [ranks " + std::to_string(other.rank) + " and " + std::to_string(member.rank) +
             " use the same GPU; call torch.cuda.set_device(hvd.local_rank()) before the first "
             "GPU tensor, and start at most as many ranks on a host as it has GPUs]";
    }
  }
  return "";
}

Result<std::unique_ptr<DeviceBackend>> DeviceAgreement::make_nccl(
    const Group& group, DeviceWorkspace& workspace, const std::vector<Candidate>& members,
    Patience patience) {
  HVDLITE_RETURN_IF_ERROR(one_nccl(members));
  struct {
    NcclUniqueId id{};
    NcclResult result = NcclResult::kSuccess;
  } start;
  const Result<std::shared_ptr<const NcclApi>> loaded = nccl_();  // present() has done so before
  HVDLITE_RETURN_IF_ERROR(loaded.status());
  const std::shared_ptr<const NcclApi>& api = loaded.value();
  const int root = group.ranks.front();
  if (fabric_->topology.rank == root) start.result = api->get_unique_id(&start.id);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(&start, 1));
  HVDLITE_RETURN_IF_ERROR(host_.broadcast({group, root, bytes, bytes}, patience));
  if (start.result != NcclResult::kSuccess) {
    return invalid("NCCL does not start on rank " + std::to_string(root) + ": " +
                   api->error_string(start.result) + "; run with NCCL_DEBUG=INFO");
  }
  Result<std::unique_ptr<NcclCommunicator>> connected =
      NcclCommunicator::connect(api, workspace.device, {group, *fabric_}, start.id, patience);
  if (!connected.ok()) {
    const Status why = connected.status();
    return Status(why.code(), why.message() + one_gpu_for_two(members), why.failed_rank());
  }
  const bool fused = std::all_of(members.begin(), members.end(),
                                 [](const Candidate& member) { return member.fused != 0; });
  return std::unique_ptr<DeviceBackend>(
      std::make_unique<NcclBackend>(std::move(connected.value()), workspace, host_, fused));
}

Status DeviceAgreement::fall_back(const Group& group, const std::vector<Candidate>& members) {
  const auto lacking = std::find_if(members.begin(), members.end(),
                                    [](const Candidate& member) { return member.nccl == 0; });
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

}  // namespace hvdlite
