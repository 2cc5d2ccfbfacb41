#include "backend/segment_copies.h"

#include <algorithm>

namespace hvdlite {
namespace {

constexpr std::string_view kPtx[] = {
#include "backend/pack_ptx.inc"
};

std::string short_name(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat16:
      return "f16";
    case DataType::kBfloat16:
      return "bf16";
    case DataType::kFloat32:
      return "f32";
    case DataType::kFloat64:
      return "f64";
    case DataType::kInt16:
      return "i16";
    default:
      return "i32";
  }
}

std::string kernel_name(DataType source, DataType target, std::span<const CopySegment> segments,
                        bool looks) {
  const bool scaled = std::any_of(segments.begin(), segments.end(),
                                  [](const CopySegment& segment) { return segment.scale != 1.0; });
  if (source == target && !scaled && !looks)
    return "hvdlite_copy_" + std::to_string(size_of(source));
  return "hvdlite_cast_" + short_name(source) + "_" + short_name(target);
}

}  // namespace

Result<std::unique_ptr<SegmentCopies>> SegmentCopies::load(std::shared_ptr<CudaDevice> device) {
  std::string text;
  for (const std::string_view piece : kPtx) text += piece;
  std::unique_ptr<SegmentCopies> copies(new SegmentCopies(std::move(device)));
  const CudaDevice& on = *copies->device_;
  const CudaDevice::Current current(on);
  HVDLITE_RETURN_IF_ERROR(on.check(on.api().module_load(&copies->module_, text.c_str()),
                                   "loading the kernels that pack gradients"));
  return copies;
}

SegmentCopies::~SegmentCopies() {
  if (module_ == nullptr) return;
  const CudaDevice::Current current(*device_);
  (void)device_->api().module_unload(module_);
}

Result<CudaFunction> SegmentCopies::kernel(const std::string& name) {
  const auto [at, is_new] = kernels_.try_emplace(name, nullptr);
  if (is_new) {
    Status status = device_->check(
        device_->api().module_function(&at->second, module_, name.c_str()), "finding " + name);
    if (!status.ok()) {
      kernels_.erase(at);
      return status;
    }
  }
  return at->second;
}

Status SegmentCopies::enqueue(DataType source, DataType target,
                              std::span<const CopySegment> segments,
                              const std::uint32_t* nonfinite) {
  const CudaDevice::Current current(*device_);
  const Result<CudaFunction> function =
      kernel(kernel_name(source, target, segments, nonfinite != nullptr));
  HVDLITE_RETURN_IF_ERROR(function.status());
  const auto word = reinterpret_cast<CudaPointer>(nonfinite);  // pinned: the same on the device
  CopyArgs args;
  clear(args, word);
  for (const CopySegment& segment : segments) {
    if (add(args, segment)) continue;
    HVDLITE_RETURN_IF_ERROR(launch(function.value(), args));
    clear(args, word);
    (void)add(args, segment);
  }
  return launch(function.value(), args);
}

Status SegmentCopies::launch(CudaFunction function, CopyArgs& args) {
  const unsigned blocks = launch_blocks(args, device_->processors());
  if (blocks == 0) return Status();
  void* parameters[] = {&args};
  ++launches_;
  return device_->check(device_->api().launch(function, blocks, 1, 1, kThreadsPerBlock, 1, 1, 0,
                                              device_->stream(), parameters, nullptr),
                        "launching a kernel");
}

}  // namespace hvdlite
