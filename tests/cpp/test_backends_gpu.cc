// The conformance suite's worlds over GPUs; what each backend must do is in the other files.
#include "gpu_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

TEST(gpu_smoke) {
  run_gpus({0, 0}, gpu_config(), [](int rank, Backend& backend, const Group& world) {
    std::vector<float> values(1000, static_cast<float>(rank + 1));
    const Piece piece{values.data(), values.data(), values.size()};
    CHECK_OK(backend.allreduce(world, DataType::kFloat32, ReduceOp::kSum, {&piece, 1}, kPatience));
    CHECK_EQ(values[999], 3.0f);
  });
}
