// Everything that one engine has of GPUs: the libraries, the devices that tensors came from, and a
// data plane for each process set, made when a set's first GPU tensor arrives. A process without
// GPU tensors loads and pays nothing.
//
// A process set has one device on each rank; plane_setup.h says how its members come to a data
// plane. NCCL needs every rank of a communicator; so while members have joined, the others have one
// of their own, until all have joined.
//
// Threads: mark(), ordinal_of(), slots and the pools from any; everything else is the runner's.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/mutex.h"
#include "gpu/device_backend.h"
#include "gpu/device_workspace.h"
#include "gpu/plane_setup.h"
#include "transport/fabric.h"

namespace hvdlite {

// How to get at the libraries; called when they are needed first, from any thread.
struct GpuLibraries {
  std::function<Result<std::shared_ptr<const CudaApi>>()> cuda;
  std::function<Result<std::shared_ptr<const NcclApi>>()> nccl;

  // Where the config says, or where they usually are; `nccl_folders` are those of nvidia-nccl
  // wheels.
  static GpuLibraries search(const Config& config, std::vector<std::string> nccl_folders);
};

class GpuPlane {
 public:
  // `host` and `fabric` are borrowed; the latter is null in a world of one.
  GpuPlane(Backend& host, Fabric* fabric, Config config, GpuLibraries libraries);
  ~GpuPlane();

  // The point that `stream` of GPU `ordinal` has come to, where a tensor of process set `set` is
  // ready. kInvalidArgument: no driver, no such device, another one than the set's on this rank, or
  // a stream that is being captured.
  Result<CudaEventPtr> mark(std::uint32_t set, int ordinal, CudaStream stream);

  // The GPU whose memory `pointer` is; of null, the one whose context is current in this thread.
  Result<int> ordinal_of(const void* pointer);
  // The data plane of a group; `ordinal` is the one that mark() was told. Every member calls it at
  // the same place in its order of collectives. A status that is not sticky is the same on every
  // member. `part`: members of the process set that have joined are not in the group.
  Result<DeviceBackend*> open(const Group& group, int ordinal, Patience patience,
                              bool part = false);
  // Ends the data plane of a process set that is about to go, once its work has ended. Every member
  // calls it at the same place.
  void forget(const Group& group);
  // The same for all that were opened as a part. Every rank calls it when all have joined.
  void forget_parts();
  // Memory for a result. Of a device that mark() has seen.
  Result<DeviceMemory> allocate(int ordinal, std::size_t bytes);
  std::shared_ptr<DeviceMemoryPool> pool(int ordinal);
  // Memory that gradients stay in, see device_slots.h.
  Result<DeviceSlots::Holder> allocate_slot(int ordinal, std::size_t bytes);

  // Looks after work that ends at `end`; poll() calls `then` when it has, but not after abort().
  void track(CudaEventPtr end, std::function<void()> then = {});
  bool busy() const { return !under_way_.empty(); }
  // An error of work under way, or of a device that has made no progress for collective_timeout.
  Status poll();
  // Ends all data planes: at once, with whatever is under way, or in good order within the
  // deadline.
  void abort();
  void close(Deadline deadline);

 private:
  struct UnderWay {
    CudaEventPtr end;
    Deadline deadline;
    std::function<void()> then;
  };
  struct Plane {
    std::unique_ptr<DeviceBackend> backend;
    bool part = false;
  };
  // By group id and ranks: everywhere in the same order.
  using Planes = std::map<std::pair<int, std::vector<int>>, Plane>;

  Status load_cuda() HVDLITE_REQUIRES(mutex_);
  Result<std::shared_ptr<const NcclApi>> nccl();
  Result<DeviceWorkspace*> workspace(int ordinal);
  // Ends those that `ends` chooses.
  void end_planes(const std::function<bool(const Planes::value_type&)>& ends);
  // Frees the slots that have ended, if no work is under way: freeing memory waits for the device.
  void free_slots();
  // Waits until no work is under way.
  void settle(Deadline deadline);

  Fabric* const fabric_;
  const Config config_;
  const GpuLibraries libraries_;

  Mutex mutex_;
  std::shared_ptr<const CudaApi> cuda_ HVDLITE_GUARDED_BY(mutex_);
  std::map<int, std::unique_ptr<DeviceWorkspace>> workspaces_ HVDLITE_GUARDED_BY(mutex_);
  std::map<std::uint32_t, int> device_of_ HVDLITE_GUARDED_BY(mutex_);  // by process set

  Mutex nccl_mutex_;
  std::shared_ptr<const NcclApi> nccl_ HVDLITE_GUARDED_BY(nccl_mutex_);

  // Of the runner.
  DeviceAgreement agreement_;
  Planes planes_;
  std::deque<UnderWay> under_way_;
};

}  // namespace hvdlite
