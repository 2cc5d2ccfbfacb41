// How the members of a process set come to a data plane for their GPU tensors: they tell each
// other, over the host's data plane, what they have. It is NCCL if all of them have it, and
// otherwise the way through the host, with one warning. Nobody outside of the set takes part.
//
// Threads: the runner only.
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

  // All are borrowed; `fabric` is null in a world of one. `nccl` loads the library when it is first
  // asked.
  DeviceAgreement(Backend& host, Fabric* fabric, const Config& config, Nccl nccl)
      : host_(host), fabric_(fabric), config_(config), nccl_(std::move(nccl)) {}

  // The data plane of a group, on this rank's device. Every member calls it at the same place in
  // its order of collectives. A status that is not sticky is the same on every member.
  Result<std::unique_ptr<DeviceBackend>> make(const Group& group, DeviceWorkspace& workspace,
                                              Patience patience);

 private:
  struct Candidate;  // what members tell each other

  Candidate present(DeviceWorkspace& workspace);
  Result<std::vector<Candidate>> exchange(const Group& group, const Candidate& own,
                                          Patience patience);
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
  bool warned_ = false;  // that GPU tensors pass through the host
};

}  // namespace hvdlite
