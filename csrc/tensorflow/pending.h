// One operation of TensorFlow between its start and its end.
//
// A thread of TensorFlow's executor makes it, and the core's thread ends it by finish(); exactly
// one of the two touches it at a time, so it needs no lock. It owns the tensors, the copy of
// TensorFlow's callback, and itself.
//
// On a GPU, work that the kernel's stream gets after finish() runs behind the result: TensorFlow
// gives memory that was let go to later work of that same stream.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "engine/c_api.h"
#include "tensorflow/tf_c_api.h"
#include "wire/message.h"

namespace hvdlite::tensorflow {

// The attributes of one node of the graph.
struct Node {
  std::string name;                // on the wire
  std::vector<std::string> names;  // Each tensor has one, for messages.
  std::int32_t op = 0;
  std::int32_t wire = -1;  // An allreduce gives TensorShape::wire; -1: the dtype itself.
  std::int32_t root = 0;
  std::int32_t process_set = 0;
};

// A TF_Tensor with an owner.
struct TensorDeleter {
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using OwnedTensor = std::unique_ptr<TF_Tensor, TensorDeleter>;

class Pending {
 public:
  // `done` is the callback that TensorFlow gave to compute: the address of a std::function on
  // TensorFlow's stack (in all versions up to 2.21), so it is copied. Every wheel uses libstdc++'s
  // std::function. `stream` is the CUstream of a kernel on a GPU.
  Pending(const Node& node, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done,
          DeviceType device, void* stream)
      : node_(node),
        context_(context),
        device_(device),
        stream_(stream),
        done_(*reinterpret_cast<const std::function<void()>*>(done)) {}

  // Takes over `self` and submits the entry. On an error it ends `self` at once.
  static void start(std::unique_ptr<Pending> self, Kind kind);

 private:
  bool read_terms();  // the last input
  bool take(Kind kind);
  bool take_tensors();
  bool take_inputs(int count);  // for results that the core allocates
  bool take_splits();
  void add_tensor(int index, const void* input, void* output);
  static void submit(std::unique_ptr<Pending> self, Kind kind);
  static void on_result(void* self, const HvdliteResult* result);
  void write_received(const HvdliteResult& result);
  bool write_rows(const HvdliteResult& result, int index);
  void fail(TF_Code code, const std::string& message);
  static void finish(std::unique_ptr<Pending> self);

  const Node& node_;  // the kernel outlives its calls
  TF_OpKernelContext* context_;
  const DeviceType device_;
  void* const stream_;
  std::function<void()> done_;
  std::string name_;
  double prescale_ = 1;
  double postscale_ = 1;
  double weight_ = 0;
  Kind kind_ = Kind::kAllreduce;
  TF_DataType dtype_ = TF_FLOAT;
  std::vector<std::vector<std::int64_t>> dims_;
  std::vector<HvdliteTensor> tensors_;
  std::vector<std::int64_t> splits_;  // as in HvdliteCall
  std::vector<OwnedTensor> held_;
};

}  // namespace hvdlite::tensorflow

extern "C" {

// Counts since the start: the outputs that took over the memory of their input, and all outputs.
__attribute__((visibility("default"))) void hvdlite_tensorflow_forwarded(std::uint64_t* forwarded,
                                                                         std::uint64_t* outputs);
}
