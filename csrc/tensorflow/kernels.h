// The kernels of the operations of ops.cc. Each starts a collective and returns, on a thread of
// TensorFlow's executor. TensorFlow goes on when the core calls the completion's continuation
// (pending.h): no Python runs between.
#pragma once

#include <cstdint>

namespace hvdlite::tensorflow {

inline constexpr const char* kAllreduceOp = "HvdliteAllreduce";
inline constexpr const char* kAllgatherOp = "HvdliteAllgather";
inline constexpr const char* kBroadcastOp = "HvdliteBroadcast";
inline constexpr const char* kReducescatterOp = "HvdliteReducescatter";
inline constexpr const char* kAlltoallOp = "HvdliteAlltoall";
inline constexpr const char* kQueryOp = "HvdliteQuery";

// Registers all kernels. Called once, while tf.load_op_library opens the library.
void register_kernels();

}  // namespace hvdlite::tensorflow

extern "C" {

// Counts since the start: the outputs that took over the memory of their input, and all outputs.
__attribute__((visibility("default"))) void hvdlite_tensorflow_forwarded(std::uint64_t* forwarded,
                                                                         std::uint64_t* outputs);
}
