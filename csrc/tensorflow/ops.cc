// The operations as TensorFlow sees them, and their kernels. They are registered when
// tf.load_op_library opens this file.
//
// The operations are not marked stateful: tf.function runs stateful operations one at a time, and
// would hang where several must be under way together (TF_OpDefinitionBuilderSetIsStateful ignores
// its bool, so it must not be called at all). Constant folding could compute a stateless operation
// without inputs; so every operation has an input, `terms` (hvdlite/tensorflow/tracing.py).
#include <dlfcn.h>

#include <memory>
#include <string>
#include <string_view>

#include "base/config.h"
#include "tensorflow/attachment.h"
#include "tensorflow/pending.h"
#include "tensorflow/tf_c_api.h"

namespace hvdlite::tensorflow {

// The CUDA stream that TensorFlow uses for its kernels on one GPU. The core makes this stream wait
// for the results of a collective before it calls back, so that TensorFlow frees and reads memory
// in the right order.
//
// The C API gives the stream to plugged-in devices only. So the code below looks up the C++
// function that TensorFlow's own kernels call, by its mangled name, which does not depend on
// abseil's version and is in 2.16 to 2.21. The result is read through classes with the shape that
// Eigen's classes have there.

// Eigen::StreamInterface: stream() is the first virtual function after the destructor. This class
// is not in an anonymous namespace, where the compiler would know that no class derives from it.
class StreamInterface {
 public:
  virtual ~StreamInterface() = default;
  virtual void* const& stream() const = 0;
};

// Eigen::GpuDevice, as far as its first member.
struct GpuDevice {
  const StreamInterface* stream;
};

namespace {

constexpr const char* kAllreduceOp = "HvdliteAllreduce";
constexpr const char* kAllgatherOp = "HvdliteAllgather";
constexpr const char* kBroadcastOp = "HvdliteBroadcast";
constexpr const char* kReducescatterOp = "HvdliteReducescatter";
constexpr const char* kAlltoallOp = "HvdliteAlltoall";
constexpr const char* kQueryOp = "HvdliteQuery";

// const Eigen::GpuDevice& tensorflow::OpKernelContext::eigen_device<Eigen::GpuDevice>() const
using FindDevice = const GpuDevice& (*)(const TF_OpKernelContext*);
constexpr const char* kFindDevice =
    "_ZNK10tensorflow15OpKernelContext12eigen_deviceIN5Eigen9GpuDeviceEEERKT_v";

FindDevice find_device() {
  static const auto found = [] {
    void* library = ::dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr
                              : reinterpret_cast<FindDevice>(::dlsym(library, kFindDevice));
  }();
  return found;
}

// True when this TensorFlow has the function. Otherwise no kernels are registered for GPUs, and
// TensorFlow copies tensors to the host and back, in the right order. Any thread.
bool can_tell_streams() { return find_device() != nullptr; }

// Returns a CUstream. Only the thread that runs a kernel for GPUs may call this, during the
// kernel's compute function. The object's own class is another one with the same shape.
[[gnu::no_sanitize("vptr")]] void* stream_of(TF_OpKernelContext* context) {
  return find_device()(context).stream->stream();
}

// The kernels. Each starts a collective and returns, on a thread of TensorFlow's executor.
// TensorFlow goes on when the core calls the completion's continuation (pending.h): no Python runs
// between.

std::string string_attr(TF_OpKernelConstruction* construction, const char* name,
                        TF_Status* status) {
  std::int32_t list = 0;
  std::int32_t bytes = 0;
  TF_OpKernelConstruction_GetAttrSize(construction, name, &list, &bytes, status);
  if (TF_GetCode(status) != TF_OK || bytes <= 0) return {};
  std::string value(static_cast<std::size_t>(bytes), '\0');
  TF_OpKernelConstruction_GetAttrString(construction, name, value.data(), value.size(), status);
  return value;
}

std::vector<std::string> strings_attr(TF_OpKernelConstruction* construction, const char* name,
                                      TF_Status* status) {
  std::int32_t count = 0;
  std::int32_t bytes = 0;
  TF_OpKernelConstruction_GetAttrSize(construction, name, &count, &bytes, status);
  if (TF_GetCode(status) != TF_OK || count <= 0) return {};
  std::vector<char*> values(static_cast<std::size_t>(count));
  std::vector<std::size_t> lengths(values.size());
  std::string storage(static_cast<std::size_t>(bytes), '\0');
  TF_OpKernelConstruction_GetAttrStringList(construction, name, values.data(), lengths.data(),
                                            count, storage.data(), storage.size(), status);
  std::vector<std::string> strings;
  if (TF_GetCode(status) != TF_OK) return strings;
  for (std::size_t i = 0; i < values.size(); ++i) strings.emplace_back(values[i], lengths[i]);
  return strings;
}

// An operation's own attributes, beside its names.
enum class Attributes { kNone, kOp, kOpAndWire, kRoot };

template <Attributes attributes, bool list>
void* create_node(TF_OpKernelConstruction* construction) {
  auto node = std::make_unique<Node>();
  const OwnedStatus status = new_status();
  node->name = string_attr(construction, "tensor_name", status.get());
  TF_OpKernelConstruction_GetAttrInt32(construction, "process_set", &node->process_set,
                                       status.get());
  if constexpr (list) node->names = strings_attr(construction, "tensor_names", status.get());
  if constexpr (attributes == Attributes::kOpAndWire) {
    TF_OpKernelConstruction_GetAttrInt32(construction, "wire", &node->wire, status.get());
  }
  if constexpr (attributes == Attributes::kOp || attributes == Attributes::kOpAndWire) {
    TF_OpKernelConstruction_GetAttrInt32(construction, "op", &node->op, status.get());
  } else if constexpr (attributes == Attributes::kRoot) {
    TF_OpKernelConstruction_GetAttrInt32(construction, "root", &node->root, status.get());
  }
  if (TF_GetCode(status.get()) != TF_OK) {
    TF_OpKernelConstruction_Failure(construction, status.get());
  }
  return node.release();  // destroy() takes it back
}

template <typename T>
void destroy(void* object) {
  delete static_cast<T*>(object);
}

template <Kind kind, DeviceType device>
void compute(void* node, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  void* stream = device == DeviceType::kGpu ? stream_of(context) : nullptr;
  Pending::start(
      std::make_unique<Pending>(*static_cast<Node*>(node), context, done, device, stream), kind);
}

// The number that a query asks for, and the process set that it asks about.
struct Query {
  std::size_t index = 0;
  std::int32_t process_set = 0;
};

void* create_query(TF_OpKernelConstruction* construction) {
  static constexpr std::string_view kAnswers[] = {"rank",       "size",       "local_rank",
                                                  "local_size", "cross_rank", "cross_size",
                                                  "set_rank",   "set_size",   "included"};
  const OwnedStatus status = new_status();
  const std::string what = string_attr(construction, "what", status.get());
  auto query = std::make_unique<Query>();
  while (query->index < std::size(kAnswers) - 1 && kAnswers[query->index] != what) ++query->index;
  TF_OpKernelConstruction_GetAttrInt32(construction, "process_set", &query->process_set,
                                       status.get());
  return query.release();  // destroy() takes it back
}

// The reason why a query has no answer, or nullptr.
const char* refuse_query(const World& now, const Query& query, HvdlitePlace* place) {
  if (now.size == 0) return "hvdlite has not been initialized; call hvd.init() first";
  if (!find_process_set(static_cast<std::uint32_t>(query.process_set), place)) {
    return "a function asks about a process set that was removed, or that belongs to an earlier "
           "world";
  }
  return nullptr;
}

void compute_query(void* of_node, TF_OpKernelContext* context) {
  const Query& query = *static_cast<Query*>(of_node);
  const World now = world();
  HvdlitePlace place{};
  const char* refusal = refuse_query(now, query, &place);
  const std::int32_t answers[] = {now.rank,       now.size,       now.local_rank,
                                  now.local_size, now.cross_rank, now.cross_size,
                                  place.rank,     place.size,     place.rank >= 0 ? 1 : 0};
  const OwnedStatus status = new_status();
  if (refusal != nullptr) {
    TF_SetStatus(status.get(), now.size == 0 ? TF_ABORTED : TF_INVALID_ARGUMENT, refusal);
    TF_OpKernelContext_Failure(context, status.get());
    return;
  }
  const OwnedTensor value(
      TF_AllocateOutput(context, 0, TF_INT32, nullptr, 0, sizeof(std::int32_t), status.get()));
  if (value == nullptr) return TF_OpKernelContext_Failure(context, status.get());
  *static_cast<std::int32_t*>(TF_TensorData(value.get())) = answers[query.index];
}

// Arguments that are read and written on the host even when the tensors are on a GPU.
using HostArguments = std::vector<const char*>;

struct AsyncOp {
  const char* name;
  void* (*create)(TF_OpKernelConstruction*);
  HostArguments on_host;
};

void register_async(const AsyncOp& op, const char* device,
                    void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*)) {
  // One kernel for every type that the operation takes: the C API has no constraint to 8-bit
  // floats.
  const OwnedStatus status = new_status();
  TF_KernelBuilder* kernel =
      TF_NewAsyncKernelBuilder(op.name, device, op.create, compute, &destroy<Node>);
  for (const char* argument : op.on_host) TF_KernelBuilder_HostMemory(kernel, argument);
  TF_RegisterKernelBuilder(op.name, kernel, status.get());
  warn_unless_ok(status.get(), op.name);
}

// A knob that cannot be read is an error of init().
bool has_kernels_for_gpus() {
  static const Result<Config> config = Config::from_environment();
  return config.ok() && config.value().tensorflow_gpu != 0 && can_tell_streams();
}

template <Kind kind>
void register_op(const AsyncOp& op) {
  register_async(op, "CPU", &compute<kind, DeviceType::kHost>);
  if (has_kernels_for_gpus()) register_async(op, "GPU", &compute<kind, DeviceType::kGpu>);
}

void register_query(const char* device) {
  const OwnedStatus status = new_status();
  TF_KernelBuilder* query =
      TF_NewKernelBuilder(kQueryOp, device, &create_query, &compute_query, &destroy<Query>);
  for (const char* argument : {"terms", "value"}) TF_KernelBuilder_HostMemory(query, argument);
  TF_RegisterKernelBuilder(kQueryOp, query, status.get());
  warn_unless_ok(status.get(), kQueryOp);
}

void register_kernels() {
  register_op<Kind::kAllreduce>(
      {kAllreduceOp, &create_node<Attributes::kOpAndWire, true>, {"terms"}});
  register_op<Kind::kBroadcast>({kBroadcastOp, &create_node<Attributes::kRoot, true>, {"terms"}});
  register_op<Kind::kAllgather>(
      {kAllgatherOp, &create_node<Attributes::kNone, true>, {"terms", "sizes"}});
  register_op<Kind::kReducescatter>(
      {kReducescatterOp, &create_node<Attributes::kOp, true>, {"terms"}});
  register_op<Kind::kAlltoall>({kAlltoallOp,
                                &create_node<Attributes::kNone, false>,
                                {"terms", "splits", "received_splits"}});
  register_query("CPU");
  if (has_kernels_for_gpus()) register_query("GPU");
}

// The definitions: names, inputs, attributes and shapes.

using Shape = std::unique_ptr<TF_ShapeHandle, decltype(&TF_DeleteShapeHandle)>;

Shape new_shape() { return {TF_NewShapeHandle(), &TF_DeleteShapeHandle}; }

constexpr const char* kReducible =
    "T: {uint8, int8, int16, int32, int64, uint16, uint32, uint64, half, bfloat16, float, double, "
    "complex64, complex128, bool}";
// The list names no types: older releases do not know all types that the core copies, and refuse an
// operation that names a type that they do not know. The core refuses types that it does not know.
constexpr const char* kAny = "T: type";

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

TF_OpDefinitionBuilder* begin(const char* name, bool list, const char* types,
                              const char* second_input = nullptr) {
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder(name);
  TF_OpDefinitionBuilderAddInput(op, list ? "tensors: N * T" : "tensor: T");
  if (second_input != nullptr) TF_OpDefinitionBuilderAddInput(op, second_input);
  TF_OpDefinitionBuilderAddInput(op, "terms: double");
  TF_OpDefinitionBuilderAddOutput(op, list ? "outputs: N * T" : "output: T");
  if (list) TF_OpDefinitionBuilderAddAttr(op, "N: int >= 1");
  TF_OpDefinitionBuilderAddAttr(op, "tensor_name: string");
  TF_OpDefinitionBuilderAddAttr(op, "process_set: int = 0");
  if (list) TF_OpDefinitionBuilderAddAttr(op, "tensor_names: list(string) = []");
  TF_OpDefinitionBuilderAddAttr(op, types);
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
  TF_OpDefinitionBuilder* op = begin(kAllreduceOp, /*list=*/true, kReducible);
  TF_OpDefinitionBuilderAddAttr(op, "op: int = 0");
  TF_OpDefinitionBuilderAddAttr(op, "wire: int = -1");
  finish(op, kAllreduceOp, &same_shapes);

  op = begin(kBroadcastOp, /*list=*/true, kAny);
  TF_OpDefinitionBuilderAddAttr(op, "root: int = 0");
  finish(op, kBroadcastOp, &same_shapes);

  op = begin(kAllgatherOp, /*list=*/true, kAny);
  TF_OpDefinitionBuilderAddOutput(op, "sizes: int64");  // [N, ranks]
  finish(op, kAllgatherOp, &received_shapes);

  op = begin(kReducescatterOp, /*list=*/true, kReducible);
  TF_OpDefinitionBuilderAddAttr(op, "op: int = 0");
  finish(op, kReducescatterOp, &received_shapes);

  op = begin(kAlltoallOp, /*list=*/false, kAny, "splits: int64");
  TF_OpDefinitionBuilderAddOutput(op, "received_splits: int64");  // [ranks]
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
