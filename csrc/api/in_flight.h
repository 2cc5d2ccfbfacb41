// The operations that came through the table of C functions and have not ended.
#pragma once

#include <vector>

#include "entry/entry.h"

namespace hvdlite {

// All of this process. One that has ended is left out once its caller has been told. Any thread.
std::vector<EntryPtr> native_entries();

}  // namespace hvdlite
