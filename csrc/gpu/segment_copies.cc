#include "gpu/segment_copies.h"

#include <algorithm>

#include "gpu/pack_ptx.h"

namespace hvdlite {
namespace {

std::string short_name(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat16:
      return "f16";
    case DataType::kBfloat16:
      return "bf16";
    case DataType::kFloat32:
      return "f32";
    default:
      return "f64";
  }
}

std::string kernel_name(DataType source, DataType target, std::span<const CopySegment> segments) {
  const bool scaled = std::any_of(segments.begin(), segments.end(),
                                  [](const CopySegment& segment) { return segment.scale != 1.0; });
  if (source == target && !scaled) return "hvdlite_copy_" + std::to_string(size_of(source));
  return "hvdlite_cast_" + short_name(source) + "_" + short_name(target);
}

}  // namespace

Result<std::unique_ptr<SegmentCopies>> SegmentCopies::load(std::shared_ptr<CudaDevice> device) {
  Result<std::unique_ptr<KernelModule>> kernels =
      KernelModule::load(std::move(device), pack_ptx(), "the kernels that pack gradients");
  HVDLITE_RETURN_IF_ERROR(kernels.status());
  return std::unique_ptr<SegmentCopies>(new SegmentCopies(std::move(kernels.value())));
}

Status SegmentCopies::enqueue(DataType source, DataType target,
                              std::span<const CopySegment> segments) {
  const std::string name = kernel_name(source, target, segments);
  CopyArgs args;
  clear(args);
  for (const CopySegment& segment : segments) {
    if (add(args, segment)) continue;
    HVDLITE_RETURN_IF_ERROR(launch(name, args));
    clear(args);
    (void)add(args, segment);
  }
  return launch(name, args);
}

Status SegmentCopies::launch(const std::string& name, CopyArgs& args) {
  const unsigned blocks = launch_blocks(args, kernels_->device().processors());
  return blocks == 0 ? Status() : kernels_->launch(name, blocks, &args);
}

}  // namespace hvdlite
