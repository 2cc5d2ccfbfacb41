// The kernels of the operations of ops.cc. Each starts a collective and returns; TensorFlow goes on
// when the core says that it has ended.
#pragma once

#include <cstdint>

namespace hvdlite::tensorflow {

inline constexpr const char* kAllreduceOp = "HvdliteAllreduce";
inline constexpr const char* kAllgatherOp = "HvdliteAllgather";
inline constexpr const char* kBroadcastOp = "HvdliteBroadcast";
inline constexpr const char* kReducescatterOp = "HvdliteReducescatter";
inline constexpr const char* kAlltoallOp = "HvdliteAlltoall";
inline constexpr const char* kQueryOp = "HvdliteQuery";

// Once, while tf.load_op_library opens the library.
void register_kernels();

}  // namespace hvdlite::tensorflow

extern "C" {

// How many outputs took over the memory of their input since the start, and how many there were.
__attribute__((visibility("default"))) void hvdlite_tensorflow_forwarded(std::uint64_t* forwarded,
                                                                         std::uint64_t* outputs);
}
