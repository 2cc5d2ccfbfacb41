// The error of TensorFlow for each failure of the core. Any thread.
#pragma once

#include "base/status.h"
#include "engine/c_api.h"
#include "tensorflow/tf_c_api.h"

namespace hvdlite::tensorflow {

// Program errors, on this rank or on the one that the message names, map to INVALID_ARGUMENT, and
// ranks that disagree to FAILED_PRECONDITION, which scripts of Horovod expect: the world goes on.
// All else ended the world and maps to ABORTED, which graphs pass on unchanged. The class that
// Python raises for each is in hvdlite/tensorflow/errors.py.
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
