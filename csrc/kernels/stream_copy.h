// A copy for memory that nobody reads soon. Pure function of memory; any thread.
#pragma once

#include <cstddef>

namespace hvdlite {

// Copies as memcpy does. On x86-64 the stores go past the caches: so the destination is not read
// from memory first, and pushes nothing out of the caches. Other threads see the copy as they see
// any earlier write of the caller.
void stream_copy(const void* source, void* destination, std::size_t bytes);

}  // namespace hvdlite
