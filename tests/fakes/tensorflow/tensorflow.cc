// A fake libtensorflow_framework.so.2: the functions that hvdlite's operations call, for
// kernels without a TensorFlow around them (README.md).
#include <cstring>

#include "fakes/tensorflow/hooks.h"

struct TF_Status {
  TF_Code code = TF_OK;
  std::string message;
};
struct TF_ShapeHandle {};
struct TF_OpDefinitionBuilder {};

namespace {

std::vector<TF_KernelBuilder>& kernels() {
  static std::vector<TF_KernelBuilder> all;
  return all;
}

std::size_t element_bytes(TF_DataType dtype) {
  switch (dtype) {
    case TF_UINT8:
    case TF_INT8:
    case TF_BOOL:
      return 1;
    case TF_INT16:
    case TF_HALF:
    case TF_BFLOAT16:
      return 2;
    case TF_FLOAT:
    case TF_INT32:
      return 4;
    default:
      return 8;
  }
}

TF_Tensor* allocate(TF_OpKernelContext* context, int index, TF_DataType dtype,
                    const std::int64_t* dims, int ndim, std::size_t bytes) {
  const auto at = static_cast<std::size_t>(index);
  if (context->outputs.size() <= at) context->outputs.resize(at + 1);
  context->outputs[at] = {dtype, {dims, dims + ndim}, context->allocate(index, bytes)};
  return new TF_Tensor(context->outputs[at]);
}

// Eigen's classes as TensorFlow's headers declare them, as far as hvdlite reads them.
struct Stream {
  virtual ~Stream() = default;
  virtual void* const& stream() const { return handle; }
  virtual const int& deviceProperties() const { return properties; }
  void* handle = nullptr;
  int properties = 0;
};
struct Device {
  const Stream* stream;
  int max_blocks = 0;
};

}  // namespace

#pragma GCC visibility push(default)

const std::vector<TF_KernelBuilder>* fake_tensorflow_kernels() { return &kernels(); }

extern "C" {

// tensorflow::OpKernelContext::eigen_device<Eigen::GpuDevice>(). It returns a reference, which its
// callers see as a pointer; C's linkage has pointers only.
const Device* eigen_device(const TF_OpKernelContext* context) asm(
    "_ZNK10tensorflow15OpKernelContext12eigen_deviceIN5Eigen9GpuDeviceEEERKT_v");
const Device* eigen_device(const TF_OpKernelContext* context) {
  thread_local Stream stream;
  thread_local Device device{&stream};
  stream.handle = context->stream;
  return &device;
}

TF_Status* TF_NewStatus() { return new TF_Status; }
void TF_DeleteStatus(TF_Status* status) { delete status; }
void TF_SetStatus(TF_Status* status, TF_Code code, const char* message) {
  *status = {code, message};
}
TF_Code TF_GetCode(const TF_Status* status) { return status->code; }
const char* TF_Message(const TF_Status* status) { return status->message.c_str(); }

void* TF_TensorData(const TF_Tensor* tensor) { return tensor->memory.get(); }
int TF_NumDims(const TF_Tensor* tensor) { return static_cast<int>(tensor->dims.size()); }
int64_t TF_Dim(const TF_Tensor* tensor, int index) {
  return tensor->dims[static_cast<std::size_t>(index)];
}
TF_DataType TF_TensorType(const TF_Tensor* tensor) { return tensor->dtype; }
void TF_DeleteTensor(TF_Tensor* tensor) { delete tensor; }

TF_OpDefinitionBuilder* TF_NewOpDefinitionBuilder(const char*) {
  return new TF_OpDefinitionBuilder;
}
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder*, const char*) {}
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder*, const char*) {}
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder*, const char*) {}
void TF_OpDefinitionBuilderSetShapeInferenceFunction(TF_OpDefinitionBuilder*,
                                                     void (*)(TF_ShapeInferenceContext*,
                                                              TF_Status*)) {}
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder* builder, TF_Status*) { delete builder; }

// No graph is built, so TensorFlow asks for no shape.
int64_t TF_ShapeInferenceContextNumInputs(TF_ShapeInferenceContext*) { return 0; }
TF_ShapeHandle* TF_NewShapeHandle() { return nullptr; }
void TF_DeleteShapeHandle(TF_ShapeHandle*) {}
void TF_ShapeInferenceContextGetInput(TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*) {
}
void TF_ShapeInferenceContextSetOutput(TF_ShapeInferenceContext*, int, TF_ShapeHandle*,
                                       TF_Status*) {}
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext*, TF_Status*) {}
TF_ShapeHandle* TF_ShapeInferenceContextScalar(TF_ShapeInferenceContext*) { return nullptr; }
TF_ShapeHandle* TF_ShapeInferenceContextVectorFromSize(TF_ShapeInferenceContext*, size_t) {
  return nullptr;
}
void TF_ShapeInferenceContextSubshape(TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, int64_t,
                                      TF_ShapeHandle*, TF_Status*) {}
void TF_ShapeInferenceContextConcatenateShapes(TF_ShapeInferenceContext*, TF_ShapeHandle*,
                                               TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*) {}
int TF_ShapeInferenceContextRankKnown(TF_ShapeInferenceContext*, TF_ShapeHandle*) { return 0; }

TF_KernelBuilder* TF_NewAsyncKernelBuilder(const char* op, const char* device,
                                           void* (*create)(TF_OpKernelConstruction*),
                                           void (*compute)(void*, TF_OpKernelContext*,
                                                           TF_AsyncOpKernelDoneCallback*),
                                           void (*destroy)(void*)) {
  return new TF_KernelBuilder{op, device, {}, create, compute, destroy};
}
TF_KernelBuilder* TF_NewKernelBuilder(const char* op, const char* device,
                                      void* (*create)(TF_OpKernelConstruction*),
                                      void (*)(void*, TF_OpKernelContext*),
                                      void (*destroy)(void*)) {
  return new TF_KernelBuilder{op, device, {}, create, nullptr, destroy};
}
void TF_KernelBuilder_HostMemory(TF_KernelBuilder* kernel, const char* argument) {
  kernel->on_host.emplace_back(argument);
}
void TF_RegisterKernelBuilder(const char*, TF_KernelBuilder* kernel, TF_Status*) {
  kernels().push_back(std::move(*kernel));
  delete kernel;
}
// Its argument is the address of a std::function, as in TensorFlow.
void TF_RunAsyncOpKernelDoneCallback(TF_AsyncOpKernelDoneCallback* done) {
  (*reinterpret_cast<std::function<void()>*>(done))();
}

int TF_NumInputs(TF_OpKernelContext* context) { return static_cast<int>(context->inputs.size()); }
void TF_GetInput(TF_OpKernelContext* context, int index, TF_Tensor** tensor, TF_Status*) {
  *tensor = new TF_Tensor(context->inputs[static_cast<std::size_t>(index)]);
}
TF_Tensor* TF_AllocateOutput(TF_OpKernelContext* context, int index, TF_DataType dtype,
                             const int64_t* dims, int ndim, size_t bytes, TF_Status*) {
  return allocate(context, index, dtype, dims, ndim, bytes);
}
// Never forwards.
TF_Tensor* TF_ForwardInputOrAllocateOutput(TF_OpKernelContext* context, const int* candidates, int,
                                           int output, const int64_t* dims, int ndim,
                                           int* forwarded, TF_Status*) {
  *forwarded = -1;
  const TF_DataType dtype = context->inputs[static_cast<std::size_t>(*candidates)].dtype;
  std::size_t bytes = element_bytes(dtype);
  for (int i = 0; i < ndim; ++i) bytes *= static_cast<std::size_t>(dims[i]);
  return allocate(context, output, dtype, dims, ndim, bytes);
}
void TF_OpKernelContext_Failure(TF_OpKernelContext* context, TF_Status* status) {
  context->failure = status->message;
}
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction*, TF_Status*) {}

void TF_OpKernelConstruction_GetAttrSize(TF_OpKernelConstruction* construction, const char* name,
                                         int32_t* list_size, int32_t* total_size, TF_Status*) {
  *list_size = 0;
  const bool is_name = std::strcmp(name, "tensor_name") == 0;
  *total_size = is_name ? static_cast<int32_t>(construction->tensor_name.size()) : 0;
}
void TF_OpKernelConstruction_GetAttrString(TF_OpKernelConstruction* construction, const char*,
                                           char* value, size_t max_length, TF_Status*) {
  construction->tensor_name.copy(value, max_length);
}
void TF_OpKernelConstruction_GetAttrStringList(TF_OpKernelConstruction*, const char*, char**,
                                               size_t*, int, void*, size_t, TF_Status*) {}
void TF_OpKernelConstruction_GetAttrInt32(TF_OpKernelConstruction* construction, const char* name,
                                          int32_t* value, TF_Status*) {
  const bool is_op = std::strcmp(name, "op") == 0;
  const bool is_set = std::strcmp(name, "process_set") == 0;
  const bool is_wire = std::strcmp(name, "wire") == 0;
  *value = is_op ? construction->op : is_set ? construction->process_set : is_wire ? -1 : 0;
}
}
#pragma GCC visibility pop
