// The PTX text of kernels/pack.cu, which tools/make_ptx.py writes and the build embeds. The driver
// compiles it for its device.
#pragma once

namespace hvdlite {

// NUL-terminated; lives as long as the process.
const char* pack_ptx();

}  // namespace hvdlite
