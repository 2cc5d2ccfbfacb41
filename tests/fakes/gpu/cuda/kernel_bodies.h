// Host bodies of the kernels of csrc/cuda/kernels.
#pragma once

#include <map>
#include <string>

#include "cuda/adasum_args.h"
#include "cuda/kernel_args.h"
#include "hooks.h"

namespace fakegpu {

#define FAKE_DECLARE(name) int run_hvdlite_##name(const void* params, const FakeLaunch* launch);
#define FAKE_COPY(bytes) FAKE_DECLARE(copy_##bytes)
#define FAKE_CAST(source, target) FAKE_DECLARE(cast_##source##_##target)
#define FAKE_TYPED(name, type) FAKE_DECLARE(adasum_##name##_##type)
#define FAKE_PLAIN(name) FAKE_DECLARE(adasum_##name)
HVDLITE_KERNELS(FAKE_COPY, FAKE_CAST, FAKE_CAST)
HVDLITE_ADASUM_KERNELS(FAKE_TYPED, FAKE_PLAIN)
#undef FAKE_DECLARE
#undef FAKE_COPY
#undef FAKE_CAST
#undef FAKE_TYPED
#undef FAKE_PLAIN

// By name: {bytes of the parameter, body}.
template <typename Kernel>
std::map<std::string, Kernel> core_kernels() {
#define FAKE_ROW(name, Args) {"hvdlite_" #name, Kernel{sizeof(hvdlite::Args), &run_hvdlite_##name}},
#define FAKE_COPY(bytes) FAKE_ROW(copy_##bytes, CopyArgs)
#define FAKE_CAST(source, target) FAKE_ROW(cast_##source##_##target, CopyArgs)
#define FAKE_TYPED(name, type) FAKE_ROW(adasum_##name##_##type, AdasumArgs)
#define FAKE_PLAIN(name) FAKE_ROW(adasum_##name, AdasumArgs)
  return {HVDLITE_KERNELS(FAKE_COPY, FAKE_CAST, FAKE_CAST)
              HVDLITE_ADASUM_KERNELS(FAKE_TYPED, FAKE_PLAIN)};
#undef FAKE_ROW
#undef FAKE_COPY
#undef FAKE_CAST
#undef FAKE_TYPED
#undef FAKE_PLAIN
}

}  // namespace fakegpu
