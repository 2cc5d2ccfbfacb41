#include "gpu/pack_ptx.h"

// The assembler copies the file, whose path CMakeLists.txt gives.
asm(R"(
  .pushsection .rodata
  .global hvdlite_pack_ptx
  .hidden hvdlite_pack_ptx
hvdlite_pack_ptx:
  .incbin ")" HVDLITE_PACK_PTX R"("
  .byte 0
  .popsection
)");

extern "C" [[gnu::visibility("hidden")]] const char hvdlite_pack_ptx[];

const char* hvdlite::pack_ptx() { return hvdlite_pack_ptx; }
