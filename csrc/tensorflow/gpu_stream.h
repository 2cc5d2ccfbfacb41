// The CUDA stream that TensorFlow gives its kernels of one GPU.
//
// The C API tells it to plugged-in devices only. So the C++ function that TensorFlow's own kernels
// ask is looked up by its mangled name, which holds nothing of abseil's version and is in 2.16 to
// 2.21; what it returns is read through classes of the shape that Eigen's have there.
#pragma once

#include "tensorflow/tf_c_api.h"

namespace hvdlite::tensorflow {

// Whether this TensorFlow has the function. Without it no kernels are registered for GPUs, and
// TensorFlow copies tensors to the host and back, in the right order.
bool can_tell_streams();

// A CUstream. On the thread that runs a kernel registered for GPU, during its compute.
void* stream_of(TF_OpKernelContext* context);

}  // namespace hvdlite::tensorflow
