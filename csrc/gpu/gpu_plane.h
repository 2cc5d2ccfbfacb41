// Everything of GPUs that one engine owns: the libraries, the devices that tensors came from, and a
// data plane for each process set, made when the set's first GPU tensor arrives. A process without
// GPU tensors loads and pays nothing.
//
// A process set has one device on each rank. Its members agree on a data plane over the host's data
// plane: each tells the others which libraries and which device it has. If all can use NCCL they
// use it; otherwise their tensors pass through the host, with one warning. NCCL needs every rank of
// a communicator; so while some members have joined, the others have a data plane of their own,
// until all have joined.
//
// A batch is done when the device has been given all of it: the producer of an entry's tensors, the
// one communication stream per device and the consumer of the results wait for each other by events
// (device_backend.h, engine/entry.h). While work is under way the runner looks for errors by
// poll(). The death of a peer arrives on the control plane, and makes the engine call abort().
//
// Threads: any thread may call mark(), ordinal_of(), pool(), pool_of_kept() and
// allocate_gradient_memory(), and use a pool; everything else is for the runner.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/mutex.h"
#include "gpu/device_backend.h"
#include "gpu/device_workspace.h"
#include "transport/fabric.h"

namespace hvdlite {

// Functions that load the libraries. GpuPlane calls each when it needs the library first, from any
// thread.
struct GpuLibraries {
  std::function<Result<std::shared_ptr<const CudaApi>>()> cuda;
  std::function<Result<std::shared_ptr<const NcclApi>>()> nccl;

  // Looks where the config says, or in the usual places; `nccl_folders` are those of nvidia-nccl
  // wheels.
  static GpuLibraries search(const Config& config, std::vector<std::string> nccl_folders);
};

// Whether a library can be used here: a row of `hvdlite-run --doctor`.
struct LibraryReport {
  std::string library;
  bool ok = true;
  // Why the library cannot be used; where it can, the file, version and features that were found.
  std::string reason;
};
// Loads both libraries; `nccl_folders` are those of nvidia-nccl wheels. Any thread.
std::vector<LibraryReport> examine_gpus(const Config& config,
                                        std::span<const std::string> nccl_folders);

struct DeviceCandidate;  // the message by which members agree on a data plane

class GpuPlane {
 public:
  // `host` and `fabric` are borrowed; `fabric` is null in a world of one.
  GpuPlane(Backend& host, Fabric* fabric, Config config, GpuLibraries libraries);
  ~GpuPlane();

  // Marks the point that `stream` of GPU `ordinal` has come to, at which a tensor of process set
  // `set` is ready. kInvalidArgument when there is no driver or no such device, when the process
  // set uses another device on this rank, or when the stream is being captured.
  Result<CudaEventPtr> mark(std::uint32_t set, int ordinal, CudaStream stream);

  // The GPU that has the memory at `pointer`; for null, the GPU whose context is current in this
  // thread.
  Result<int> ordinal_of(const void* pointer);
  // The data plane of a group, on the GPU `ordinal` that mark() was given. Every member calls this
  // at the same place in its order of collectives. A status that is not sticky is the same on every
  // member. `part` says that some members of the process set have joined and are not in the group.
  Result<DeviceBackend*> open(const Group& group, int ordinal, Patience patience,
                              bool part = false);
  // Ends the data plane of a process set that is about to go, once the plane's work has ended.
  // Every member calls this at the same place.
  void forget(const Group& group);
  // Does the same for all data planes that were opened as a part. Every rank calls this when all
  // ranks have joined.
  void forget_parts();
  // Memory for a result, on a device that mark() has seen.
  Result<DeviceMemory> allocate(int ordinal, std::size_t bytes);
  std::shared_ptr<DeviceMemoryPool> pool(int ordinal);
  // Returns the pool of the inputs that an elastic job keeps.
  std::shared_ptr<DeviceMemoryPool> pool_of_kept(int ordinal);
  // Allocates gradient memory, see GradientMemory.
  Result<GradientMemory::Holder> allocate_gradient_memory(int ordinal, std::size_t bytes);

  // Notes work that ends at `end`.
  void track(CudaEventPtr end);
  bool busy() const { return !under_way_.empty(); }
  // Returns an error of work under way; kTimeout when work was under way for collective_timeout.
  Status poll();
  // Both end all data planes: abort() at once, with the work under way; close() in good order, or
  // like abort() at the deadline.
  void abort();
  void close(Deadline deadline);

 private:
  struct UnderWay {
    CudaEventPtr end;
    Deadline deadline;
  };
  struct Plane {
    std::unique_ptr<DeviceBackend> backend;
    bool part = false;
  };
  // The key is a group id with ranks, so that every rank goes through them in the same order.
  using Planes = std::map<std::pair<int, std::vector<int>>, Plane>;

  // Makes the data plane of a group, on this rank's device; errors are those of open().
  Result<std::unique_ptr<DeviceBackend>> make(const Group& group, DeviceWorkspace& workspace,
                                              Patience patience);
  DeviceCandidate present(DeviceWorkspace& workspace);
  Result<std::unique_ptr<DeviceBackend>> make_nccl(const Group& group, DeviceWorkspace& workspace,
                                                   const std::vector<DeviceCandidate>& members,
                                                   Patience patience);
  Status fall_back(const Group& group, const std::vector<DeviceCandidate>& members);

  Status load_cuda() HVDLITE_REQUIRES(mutex_);
  Result<std::shared_ptr<const NcclApi>> nccl();
  Result<DeviceWorkspace*> workspace(int ordinal);
  // Ends the data planes that `ends` chooses.
  void end_planes(const std::function<bool(const Planes::value_type&)>& ends);
  // Frees the gradient memory that has ended, if no work is under way: freeing memory waits for the
  // device.
  void free_gradient_memory();
  // Waits until no work is under way.
  void settle(Deadline deadline);

  Backend& host_;
  Fabric* const fabric_;
  const Config config_;
  const GpuLibraries libraries_;

  Mutex mutex_;
  std::shared_ptr<const CudaApi> cuda_ HVDLITE_GUARDED_BY(mutex_);
  std::map<int, std::unique_ptr<DeviceWorkspace>> workspaces_ HVDLITE_GUARDED_BY(mutex_);
  std::map<std::uint32_t, int> device_of_ HVDLITE_GUARDED_BY(mutex_);  // The key is a process set.

  Mutex nccl_mutex_;
  std::shared_ptr<const NcclApi> nccl_ HVDLITE_GUARDED_BY(nccl_mutex_);

  // Only the runner uses the fields below.
  bool warned_ = false;  // this rank has warned that GPU tensors pass through the host
  Planes planes_;
  std::deque<UnderWay> under_way_;
};

}  // namespace hvdlite
