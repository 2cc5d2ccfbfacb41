// TF_Status with an owner. Any thread.
#pragma once

#include <cstdio>
#include <memory>

#include "tensorflow/tf_c_api.h"

namespace hvdlite::tensorflow {

using OwnedStatus = std::unique_ptr<TF_Status, decltype(&TF_DeleteStatus)>;

inline OwnedStatus new_status() { return {TF_NewStatus(), &TF_DeleteStatus}; }

// Prints an error of registration, where no caller could take it. An operation that is missing
// fails later, by its name.
inline void warn_unless_ok(const TF_Status* status, const char* what) {
  if (TF_GetCode(status) == TF_OK) return;
  (void)std::fprintf(stderr, "hvdlite: TensorFlow refused %s: %s\n", what, TF_Message(status));
}

}  // namespace hvdlite::tensorflow
