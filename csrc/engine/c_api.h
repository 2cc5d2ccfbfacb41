// The engine as a table of C functions, for libraries that are not linked with it: `_core` makes
// the table, Python carries its address over, and the library (csrc/tensorflow) calls through it.
//
// Plain C types only: both sides may come from different compilers. Version first, so that a
// library of another release is refused before anything else is read. Threads: submit() from any
// thread, without the GIL. The table and its engine outlive every call.
#pragma once

#include <cstdint>

namespace hvdlite {

class Engine;

inline constexpr std::uint32_t kCoreTableVersion = 7;

extern "C" {

// One tensor; `name` is for messages. `output` is unused where the result comes with
// HvdliteResult: allgather, alltoall, reducescatter.
struct HvdliteTensor {
  const char* name;
  std::int32_t dtype;   // DataType
  std::int32_t wire;    // An allreduce gives TensorShape::wire as a number; others repeat `dtype`.
  std::int32_t device;  // DeviceType, where `input` and `output` lie
  std::int32_t ndim;
  const std::int64_t* dims;
  const void* input;
  void* output;
};

// How a collective ended. Valid during the call of `done` only.
struct HvdliteResult {
  std::int32_t code;  // StatusCode: 0 is success
  const char* message;
  // What was received, by tensor: see Completion. The output of tensor i has the rows of
  // first_dimensions[i * parts] to [(i + 1) * parts], added up.
  const std::int64_t* first_dimensions;
  std::int32_t parts;  // Each output has one per member of the set; a reducescatter's has 1.
  std::int32_t count;  // outputs; 0 for collectives that write to HvdliteTensor::output
  const std::uint64_t* output_bytes;
  // Copies output i to memory on its device: on the host at once, on a GPU in the order of the
  // call's stream. Once for each output. False: the copy failed, and the world is to be given up.
  bool (*copy_output)(const HvdliteResult* result, std::int32_t i, void* target);
  void* core;  // for the core alone
};

// One collective. What it points to is copied by submit(), except for the tensors' memory, which
// stays valid until `done`.
struct HvdliteCall {
  std::int32_t kind;  // Kind
  std::int32_t op;    // ReduceOp
  std::int32_t root;
  std::uint32_t process_set;
  double prescale;
  double postscale;
  double weight;  // NaN: none
  const char* name;
  std::int32_t count;
  const HvdliteTensor* tensors;
  // Tensors on a GPU are all on the same one. They are ready at the point that this CUstream has
  // come to, and it waits for the results, and for the memory to be free, from `done` on.
  void* stream;
  // Alltoall and reducescatter: see Request::splits.
  std::int32_t split_count;
  const std::int64_t* splits;
  // Called exactly once: by submit() itself when the call is refused or the world has one rank,
  // otherwise by the engine's runner, which it must not block.
  void (*done)(void* context, const HvdliteResult* result);
  void* context;
};

// This rank's place in a process set.
struct HvdlitePlace {
  std::int32_t rank;  // -1: it is not a member
  std::int32_t size;
};

struct HvdliteCore {
  std::uint32_t version;
  void* engine;
  void (*submit)(void* engine, const HvdliteCall* call);
  // False: the set does not exist.
  bool (*find)(void* engine, std::uint32_t process_set, HvdlitePlace* place);
};

}  // extern "C"

// The table of this engine.
HvdliteCore make_core_table(Engine& engine);

}  // namespace hvdlite
