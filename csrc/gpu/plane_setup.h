// The way in which the members of a process set agree on a data plane for their GPU tensors. Over
// the host's data plane, each tells the others which libraries and which device it has. If all can
// use NCCL they use it; otherwise their tensors pass through the host, with one warning. Ranks
// outside of the process set take no part. While some members have joined, those that are left
// agree anew.
//
// Owned by GpuPlane. Runner only.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "gpu/device_backend.h"
#include "gpu/device_workspace.h"
#include "transport/fabric.h"

namespace hvdlite {

class DeviceAgreement {
 public:
  using Nccl = std::function<Result<std::shared_ptr<const NcclApi>>()>;

  // All references are borrowed; `fabric` is null in a world of one. `nccl` loads the library at
  // its first call.
  DeviceAgreement(Backend& host, Fabric* fabric, const Config& config, Nccl nccl)
      : host_(host), fabric_(fabric), config_(config), nccl_(std::move(nccl)) {}

  // Makes the data plane of a group, on this rank's device. Every member calls this at the same
  // place in its order of collectives. A status that is not sticky is the same on every member.
  Result<std::unique_ptr<DeviceBackend>> make(const Group& group, DeviceWorkspace& workspace,
                                              Patience patience);

 private:
  struct Candidate;  // the message that members exchange

  Candidate present(DeviceWorkspace& workspace);
  static Status one_nccl(const std::vector<Candidate>& members);
  static std::string one_gpu_for_two(const std::vector<Candidate>& members);
  Result<std::unique_ptr<DeviceBackend>> make_nccl(const Group& group, DeviceWorkspace& workspace,
                                                   const std::vector<Candidate>& members,
                                                   Patience patience);
  Status fall_back(const Group& group, const std::vector<Candidate>& members);

  Backend& host_;
  Fabric* const fabric_;
  const Config& config_;
  const Nccl nccl_;
  bool warned_ = false;  // true once this rank has warned that GPU tensors pass through the host
};

}  // namespace hvdlite
