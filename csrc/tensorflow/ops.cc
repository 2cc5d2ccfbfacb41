// The operations as TensorFlow sees them: names, inputs, attributes and shapes. They are registered
// when tf.load_op_library opens this file.
//
// The operations are not marked stateful: tf.function runs stateful operations one at a time, and
// would hang where several must be under way together (TF_OpDefinitionBuilderSetIsStateful ignores
// its bool, so it must not be called at all). Constant folding could compute a stateless operation
// without inputs; so every operation has an input, `terms` (hvdlite/tensorflow/tracing.py).
#include <memory>
#include <string>

#include "tensorflow/kernels.h"
#include "tensorflow/tf_c_api.h"
#include "tensorflow/tf_status.h"

namespace hvdlite::tensorflow {
namespace {

using Shape = std::unique_ptr<TF_ShapeHandle, decltype(&TF_DeleteShapeHandle)>;

Shape new_shape() { return {TF_NewShapeHandle(), &TF_DeleteShapeHandle}; }

constexpr const char* kReducible =
    "{uint8, int8, int16, int32, int64, uint16, uint32, uint64, half, bfloat16, float, double, "
    "complex64, complex128, bool}";
// The list names no types: older releases do not know all types that the core copies, and refuse an
// operation that names a type that they do not know. The core refuses types that it does not know.
constexpr const char* kAny = "type";

// Every output has the shape of its input; the last input is `terms`.
void same_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  const Shape shape = new_shape();
  const auto tensors = static_cast<int>(TF_ShapeInferenceContextNumInputs(context)) - 1;
  for (int i = 0; i < tensors && TF_GetCode(status) == TF_OK; ++i) {
    TF_ShapeInferenceContextGetInput(context, i, shape.get(), status);
    if (TF_GetCode(status) != TF_OK) return;
    TF_ShapeInferenceContextSetOutput(context, i, shape.get(), status);
  }
}

// [?, rest of the input...] for one input and its output.
void any_rows(TF_ShapeInferenceContext* context, int index, TF_Status* status) {
  const Shape input = new_shape();
  const Shape output = new_shape();
  const Shape first(TF_ShapeInferenceContextVectorFromSize(context, static_cast<size_t>(-1)),
                    &TF_DeleteShapeHandle);
  TF_ShapeInferenceContextGetInput(context, index, input.get(), status);
  if (TF_GetCode(status) != TF_OK) return;
  if (TF_ShapeInferenceContextRankKnown(context, input.get()) == 0) return;
  TF_ShapeInferenceContextSubshape(context, input.get(), 1, INT64_MAX, output.get(), status);
  if (TF_GetCode(status) != TF_OK) return;
  TF_ShapeInferenceContextConcatenateShapes(context, first.get(), output.get(), output.get(),
                                            status);
  if (TF_GetCode(status) != TF_OK) return;
  TF_ShapeInferenceContextSetOutput(context, index, output.get(), status);
}

// Every output of a list has a number of rows that only the run brings; further outputs are
// unknown.
void received_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
  const auto tensors = static_cast<int>(TF_ShapeInferenceContextNumInputs(context)) - 1;
  for (int i = 0; i < tensors && TF_GetCode(status) == TF_OK; ++i) any_rows(context, i, status);
}

// The shapes of an alltoall: the rows, and [?] for the received splits.
void alltoall_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  const Shape vector(TF_ShapeInferenceContextVectorFromSize(context, static_cast<size_t>(-1)),
                     &TF_DeleteShapeHandle);
  TF_ShapeInferenceContextSetUnknownShape(context, status);
  TF_ShapeInferenceContextSetOutput(context, 1, vector.get(), status);
  if (TF_GetCode(status) == TF_OK) any_rows(context, 0, status);
}

void scalar_shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  const Shape scalar(TF_ShapeInferenceContextScalar(context), &TF_DeleteShapeHandle);
  TF_ShapeInferenceContextSetOutput(context, 0, scalar.get(), status);
}

TF_OpDefinitionBuilder* begin(const char* name, bool list, const char* second_input = nullptr) {
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder(name);
  TF_OpDefinitionBuilderAddInput(op, list ? "tensors: N * T" : "tensor: T");
  if (second_input != nullptr) TF_OpDefinitionBuilderAddInput(op, second_input);
  TF_OpDefinitionBuilderAddInput(op, "terms: double");
  TF_OpDefinitionBuilderAddOutput(op, list ? "outputs: N * T" : "output: T");
  if (list) TF_OpDefinitionBuilderAddAttr(op, "N: int >= 1");
  TF_OpDefinitionBuilderAddAttr(op, "tensor_name: string");
  TF_OpDefinitionBuilderAddAttr(op, "process_set: int = 0");
  if (list) TF_OpDefinitionBuilderAddAttr(op, "tensor_names: list(string) = []");
  return op;
}

void finish(TF_OpDefinitionBuilder* op, const char* name,
            void (*shapes)(TF_ShapeInferenceContext*, TF_Status*)) {
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, shapes);
  const OwnedStatus status = new_status();
  TF_RegisterOpDefinition(op, status.get());
  warn_unless_ok(status.get(), name);
}

void register_ops() {
  TF_OpDefinitionBuilder* op = begin(kAllreduceOp, /*list=*/true);
  TF_OpDefinitionBuilderAddAttr(op, (std::string("T: ") + kReducible).c_str());
  TF_OpDefinitionBuilderAddAttr(op, "op: int = 0");
  TF_OpDefinitionBuilderAddAttr(op, "wire: int = -1");
  finish(op, kAllreduceOp, &same_shapes);

  op = begin(kBroadcastOp, /*list=*/true);
  TF_OpDefinitionBuilderAddAttr(op, (std::string("T: ") + kAny).c_str());
  TF_OpDefinitionBuilderAddAttr(op, "root: int = 0");
  finish(op, kBroadcastOp, &same_shapes);

  op = begin(kAllgatherOp, /*list=*/true);
  TF_OpDefinitionBuilderAddOutput(op, "sizes: int64");  // [N, ranks]
  TF_OpDefinitionBuilderAddAttr(op, (std::string("T: ") + kAny).c_str());
  finish(op, kAllgatherOp, &received_shapes);

  op = begin(kReducescatterOp, /*list=*/true);
  TF_OpDefinitionBuilderAddAttr(op, (std::string("T: ") + kReducible).c_str());
  TF_OpDefinitionBuilderAddAttr(op, "op: int = 0");
  finish(op, kReducescatterOp, &received_shapes);

  op = begin(kAlltoallOp, /*list=*/false, "splits: int64");
  TF_OpDefinitionBuilderAddOutput(op, "received_splits: int64");  // [ranks]
  TF_OpDefinitionBuilderAddAttr(op, (std::string("T: ") + kAny).c_str());
  finish(op, kAlltoallOp, &alltoall_shapes);

  op = TF_NewOpDefinitionBuilder(kQueryOp);
  TF_OpDefinitionBuilderAddInput(op, "terms: double");
  TF_OpDefinitionBuilderAddOutput(op, "value: int32");
  TF_OpDefinitionBuilderAddAttr(
      op,
      "what: {'rank', 'size', 'local_rank', 'local_size', 'cross_rank', 'cross_size', 'set_rank', "
      "'set_size', 'included'}");
  TF_OpDefinitionBuilderAddAttr(op, "process_set: int = 0");  // The last three ask for it.
  finish(op, kQueryOp, &scalar_shape);
}

const bool kRegistered = [] {
  register_ops();
  register_kernels();
  return true;
}();

}  // namespace
}  // namespace hvdlite::tensorflow
