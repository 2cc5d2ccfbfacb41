#include "gpu/kernels.h"

#include <algorithm>

#include "gpu/kernel_args.h"

// The PTX text of pack.cu, NUL-terminated, which tools/make_ptx.py writes: the assembler copies the
// file, whose path CMakeLists.txt gives.
asm(R"(
  .pushsection .rodata
  .global hvdlite_pack_ptx
  .hidden hvdlite_pack_ptx
hvdlite_pack_ptx:
  .incbin ")" HVDLITE_PACK_PTX R"("
  .byte 0
  .popsection
)");

extern "C" [[gnu::visibility("hidden")]] const char hvdlite_pack_ptx[];

namespace hvdlite {
namespace {

// "bf16", "f32"...
std::string short_name(DataType dtype) {
  return (dtype == DataType::kBfloat16 ? "bf" : "f") + std::to_string(8 * size_of(dtype));
}

std::string kernel_name(DataType source, DataType target, std::span<const CopySegment> segments) {
  const bool scaled = std::any_of(segments.begin(), segments.end(),
                                  [](const CopySegment& segment) { return segment.scale != 1.0; });
  if (source == target && !scaled) return "hvdlite_copy_" + std::to_string(size_of(source));
  return "hvdlite_cast_" + short_name(source) + "_" + short_name(target);
}

}  // namespace

Result<std::unique_ptr<SegmentCopies>> SegmentCopies::load(std::shared_ptr<CudaDevice> device) {
  std::unique_ptr<SegmentCopies> made(new SegmentCopies(std::move(device)));
  const CudaDevice& on = *made->device_;
  const CudaDevice::Current current(on);
  HVDLITE_RETURN_IF_ERROR(on.check(on.api().module_load(&made->module_, hvdlite_pack_ptx),
                                   "loading the kernels that pack gradients"));
  return made;
}

SegmentCopies::~SegmentCopies() {
  if (module_ == nullptr) return;
  const CudaDevice::Current current(*device_);
  (void)device_->api().module_unload(module_);
}

Status SegmentCopies::enqueue(DataType source, DataType target,
                              std::span<const CopySegment> segments) {
  const std::string name = kernel_name(source, target, segments);
  CopyArgs args;
  const auto launch_all = [&] {
    const unsigned blocks = launch_blocks(args, device_->processors());
    return blocks == 0 ? Status() : launch(name, blocks, args);
  };
  clear(args);
  for (const CopySegment& segment : segments) {
    if (add(args, segment)) continue;
    HVDLITE_RETURN_IF_ERROR(launch_all());
    clear(args);
    (void)add(args, segment);
  }
  return launch_all();
}

Status SegmentCopies::launch(const std::string& name, unsigned blocks, CopyArgs& args) {
  const CudaDevice::Current current(*device_);
  HVDLITE_ASSIGN_OR_RETURN(CudaFunction function, kernel(name));
  void* parameters[] = {&args};
  return device_->check(device_->api().launch(function, blocks, 1, 1, kThreadsPerBlock, 1, 1, 0,
                                              device_->stream(), parameters, nullptr),
                        "launching a kernel");
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

}  // namespace hvdlite
