// All-reduce by adaptive summation of tensors on a device: the way of adasum_reduction.h, with the
// dot products and the combination in kernels (adasum_args.h) and everything on the device's
// communication stream. The data travel by the plane's alltoall, allreduce and allgather.
//
// The scratch of a round is the fusion buffer. What does not fit there, one large tensor, takes
// memory of its own, which stays. Before it is needed first the members agree, over the host, that
// all of them have it. 16-bit types travel as they are, and are combined in float32.
// Thread: the runner.
#pragma once

#include <span>
#include <vector>

#include "gpu/adasum_layout.h"
#include "gpu/device_backend.h"
#include "gpu/device_workspace.h"

namespace hvdlite {

class DeviceAdasum {
 public:
  // The workspace is borrowed. `room`: bytes of the fusion buffer, 0 if some member has none.
  DeviceAdasum(DeviceWorkspace& workspace, std::uint64_t room)
      : workspace_(workspace), room_(room) {}

  // As DeviceBackend::prepare_adasum; `index` is this rank's in the group, `host` the host's plane.
  Status prepare(Backend& host, const Group& group, int index, DataType dtype,
                 std::span<const std::uint64_t> counts, Patience patience);
  // As Backend::allreduce, after prepare() with the pieces' counts. `plane` runs the parts. Of the
  // inputs `nonfinite`, if there is one, is told as SegmentCopies::enqueue() does.
  Status run(DeviceBackend& plane, const Group& group, int index, DataType dtype,
             std::span<const Piece> pieces, const std::uint32_t* nonfinite, Patience patience);

 private:
  // One round as this rank sees it.
  struct Work {
    DataType dtype;
    std::uint64_t members;
    Range part;            // this rank's, of the run
    CudaPointer run;       // addresses
    CudaPointer received;  // vectors of the part, one after the other
    CudaPointer dots;
    std::vector<AdasumArgs> tables;            // of the part's segments
    const std::uint32_t* nonfinite = nullptr;  // see run()
  };

  std::vector<AdasumRound> lay_out(DataType dtype, std::span<const std::uint64_t> counts,
                                   std::uint64_t members) const;
  Status agree(Backend& host, const Group& group, int index, const Status& own, Patience patience);
  Work set_up(const AdasumRound& round, DataType dtype, std::uint64_t members, int index) const;
  Status run_round(DeviceBackend& plane, const Group& group, const AdasumRound& round,
                   const Work& work, std::span<const Piece> pieces, Patience patience);
  Status pack(const AdasumRound& round, const Work& work, std::span<const Piece> pieces);
  Status unpack(const AdasumRound& round, const Work& work, std::span<const Piece> pieces);
  // Combines the vectors that each rank gave of the part into the first of those received.
  Status combine(DeviceBackend& plane, const Group& group, Work work, std::uint64_t tensors,
                 Patience patience);
  // One level of the tree, as the tables say; `dots`: how many there are, of pairs and tensors.
  Status combine_pairs(DeviceBackend& plane, const Group& group, Work& work, std::uint64_t dots,
                       Patience patience);
  Status launch(const char* kernel, AdasumArgs& table, std::uint64_t items);
  CudaDevice& device() const { return *workspace_.device; }

  DeviceWorkspace& workspace_;
  const std::uint64_t room_;
  bool prepared_ = false;     // every member has the kernels
  std::uint64_t agreed_ = 0;  // bytes of scratch beside the fusion buffer that every member has
  std::vector<CopySegment> segments_;
};

}  // namespace hvdlite
