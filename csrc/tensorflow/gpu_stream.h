// The CUDA stream that TensorFlow uses for its kernels on one GPU. The core makes this stream wait
// for the results of a collective before it calls back, so that TensorFlow frees and reads memory
// in the right order.
//
// The C API gives the stream to plugged-in devices only. So this file looks up the C++ function
// that TensorFlow's own kernels call, by its mangled name, which does not depend on abseil's
// version and is in 2.16 to 2.21. The result is read through classes with the shape that Eigen's
// classes have there.
#pragma once

#include "tensorflow/tf_c_api.h"

namespace hvdlite::tensorflow {

// True when this TensorFlow has the function. Otherwise no kernels are registered for GPUs, and
// TensorFlow copies tensors to the host and back, in the right order. Any thread.
bool can_tell_streams();

// Returns a CUstream. Only the thread that runs a kernel for GPUs may call this, during the
// kernel's compute function.
void* stream_of(TF_OpKernelContext* context);

}  // namespace hvdlite::tensorflow
