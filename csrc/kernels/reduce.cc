#include "kernels/reduce.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "base/cpu.h"
#include "base/text.h"
#include "kernels/reduce_variants.h"

namespace hvdlite {

ReduceFunction best_reduce() {
#if defined(__x86_64__)
  if (cpu_features().avx2_f16c) return &avx2::reduce_any;
#endif
  return &portable::reduce_any;
}

CastFunction best_cast() {
#if defined(__x86_64__)
  if (cpu_features().avx2_f16c) return &avx2::cast_any;
#endif
  return &portable::cast_any;
}

void no_such_reduction(DataType dtype, ReduceOp op) {
  log(LogLevel::kFatal, -1,
      "a bug in hvdlite: the processor was asked to reduce " + std::string(name_of(dtype)) +
          " by " + std::string(name_of(op)));
  std::abort();
}

void reduce(DataType dtype, ReduceOp op, std::span<const void* const> sources, void* destination,
            std::size_t count, const Finish& finish) {
  static const ReduceFunction kBest = best_reduce();
  kBest(dtype, op, sources, destination, count, finish);
}

void scale_copy(ElementTypes types, const void* source, void* destination, std::size_t count,
                double factor) {
  static const CastFunction kBest = best_cast();
  if (count == 0) return;
  if (types.cast()) return kBest(types, source, destination, count, factor);
  if (factor != 1.0) {
    return reduce(types.memory, ReduceOp::kSum, {&source, 1}, destination, count, {1, factor});
  }
  if (source != destination) std::memcpy(destination, source, count * size_of(types.memory));
}

}  // namespace hvdlite
