// The core that the operations of this library reach: handed over by Python when a world begins,
// taken away when it ends (hvdlite/tensorflow/graph/library.py, through ctypes).
//
// Any thread. A call while nothing is attached ends with an error that says to call hvd.init().
#pragma once

#include "capi/c_api.h"

namespace hvdlite::tensorflow {

// Submits to the attached core. `call.done` is called exactly once, perhaps before this returns.
void submit(const HvdliteCall& call);

// This rank's place in the world, in the order of World below; all zero while nothing is attached.
struct World {
  std::int32_t rank, size, local_rank, local_size, cross_rank, cross_size;
};
World world();

// This rank's place in a process set of the attached core; false: there is no such set.
bool find_process_set(std::uint32_t process_set, HvdlitePlace* place);

}  // namespace hvdlite::tensorflow

extern "C" {

// Attaches a core (null: detaches), which stays alive until the next call. False: it is of another
// version than this library, and nothing is attached.
__attribute__((visibility("default"))) bool hvdlite_tensorflow_attach(
    const hvdlite::HvdliteCore* core, const hvdlite::tensorflow::World* world);
}
