// The core that the operations of this library call. The library is not linked with the core:
// `_core` makes a versioned table of C functions (engine/c_api.h), and Python hands the table over
// when a world begins and takes it away when the world ends (hvdlite/tensorflow/library.py,
// through ctypes).
//
// Any thread. A call while no core is attached ends with an error that says to call hvd.init().
#pragma once

#include "base/status.h"
#include "engine/c_api.h"
#include "tensorflow/tf_c_api.h"

namespace hvdlite::tensorflow {

// Submits a call to the attached core, which calls `call.done` exactly once, perhaps before this
// function returns.
void submit(const HvdliteCall& call);

// This rank's numbers in the world; all zero while no core is attached.
struct World {
  std::int32_t rank, size, local_rank, local_size, cross_rank, cross_size;
};
World world();

// Gives this rank's place in a process set of the attached core; false when there is no such set.
bool find_process_set(std::uint32_t process_set, HvdlitePlace* place);

// The error of TensorFlow for a failure of the core. Program errors, on this rank or on the one
// that the message names, map to INVALID_ARGUMENT, and ranks that disagree to FAILED_PRECONDITION,
// which scripts of Horovod expect: the world goes on. All else ended the world and maps to ABORTED,
// which graphs pass on unchanged. The class that Python raises for each is in
// hvdlite/tensorflow/library.py.
inline TF_Code code_of(const HvdliteResult& result) {
  switch (static_cast<StatusCode>(result.code)) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kDuplicateName:
      return TF_INVALID_ARGUMENT;
    case StatusCode::kMismatch:
    case StatusCode::kDeadlock:
      return TF_FAILED_PRECONDITION;
    case StatusCode::kOutOfMemory:
      return TF_RESOURCE_EXHAUSTED;
    default:
      return TF_ABORTED;
  }
}

}  // namespace hvdlite::tensorflow

extern "C" {

// Attaches a core, or detaches it (null). The caller keeps the core alive until the next call of
// this function. False when the core has another version than this library; then none is attached.
__attribute__((visibility("default"))) bool hvdlite_tensorflow_attach(
    const hvdlite::HvdliteCore* core, const hvdlite::tensorflow::World* world);
}
