// Host bodies of the kernels of csrc/gpu/cuda/kernels.
#pragma once

#include <map>
#include <string>

#include "gpu/cuda/kernel_args.h"
#include "hooks.h"

namespace fakegpu {

#define FAKE_DECLARE(name) int run_hvdlite_##name(const void* params, const FakeLaunch* launch);
#define FAKE_COPY(bytes) FAKE_DECLARE(copy_##bytes)
#define FAKE_CAST(source, target) FAKE_DECLARE(cast_##source##_##target)
HVDLITE_KERNELS(FAKE_COPY, FAKE_CAST)
#undef FAKE_DECLARE
#undef FAKE_COPY
#undef FAKE_CAST

// By name: {bytes of the parameter, body}.
template <typename Kernel>
std::map<std::string, Kernel> core_kernels() {
#define FAKE_ROW(name) {"hvdlite_" #name, Kernel{sizeof(hvdlite::CopyArgs), &run_hvdlite_##name}},
#define FAKE_COPY(bytes) FAKE_ROW(copy_##bytes)
#define FAKE_CAST(source, target) FAKE_ROW(cast_##source##_##target)
  return {HVDLITE_KERNELS(FAKE_COPY, FAKE_CAST)};
#undef FAKE_ROW
#undef FAKE_COPY
#undef FAKE_CAST
}

}  // namespace fakegpu
