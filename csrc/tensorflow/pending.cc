#include "tensorflow/pending.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>

#include "tensorflow/attachment.h"
#include "tensorflow/tf_c_api.h"
#include "wire/message.h"

namespace hvdlite::tensorflow {
namespace {

std::atomic<std::uint64_t> g_forwarded{0};
std::atomic<std::uint64_t> g_outputs{0};

OwnedTensor input_of(TF_OpKernelContext* context, int index, TF_Status* status) {
  TF_Tensor* tensor = nullptr;
  TF_GetInput(context, index, &tensor, status);
  return OwnedTensor(tensor);
}

std::vector<std::int64_t> dims_of(const TF_Tensor* tensor) {
  std::vector<std::int64_t> dims;
  for (int i = 0; i < TF_NumDims(tensor); ++i) dims.push_back(TF_Dim(tensor, i));
  return dims;
}

// The core's number of a type; -1 when the core does not know the type.
int core_dtype(TF_DataType dtype) {
  struct Row {
    TF_DataType theirs;
    DataType ours;
  };
  constexpr Row kRows[] = {
      {TF_UINT8, DataType::kUint8},
      {TF_INT8, DataType::kInt8},
      {TF_INT16, DataType::kInt16},
      {TF_INT32, DataType::kInt32},
      {TF_INT64, DataType::kInt64},
      {TF_HALF, DataType::kFloat16},
      {TF_BFLOAT16, DataType::kBfloat16},
      {TF_FLOAT, DataType::kFloat32},
      {TF_DOUBLE, DataType::kFloat64},
      {TF_BOOL, DataType::kBool},
      {TF_UINT16, DataType::kUint16},
      {TF_UINT32, DataType::kUint32},
      {TF_UINT64, DataType::kUint64},
      {TF_COMPLEX64, DataType::kComplex64},
      {TF_COMPLEX128, DataType::kComplex128},
      {TF_FLOAT8_E4M3FN, DataType::kFloat8E4m3fn},
      {TF_FLOAT8_E5M2, DataType::kFloat8E5m2},
      {TF_FLOAT8_E4M3FNUZ, DataType::kFloat8E4m3fnuz},
      {TF_FLOAT8_E5M2FNUZ, DataType::kFloat8E5m2fnuz},
      {TF_FLOAT8_E4M3B11FNUZ, DataType::kFloat8E4m3b11fnuz},
  };
  for (const Row& row : kRows) {
    if (row.theirs == dtype) return static_cast<int>(row.ours);
  }
  return -1;
}

}  // namespace

bool Pending::read_terms() {
  const OwnedStatus status = new_status();
  const int last = TF_NumInputs(context_) - 1;
  const OwnedTensor terms = input_of(context_, last, status.get());
  if (TF_GetCode(status.get()) != TF_OK || TF_NumDims(terms.get()) != 1 ||
      TF_Dim(terms.get(), 0) != 4) {
    fail(TF_INVALID_ARGUMENT, "terms are [number, prescale, postscale, weight]");
    return false;
  }
  double values[4];
  std::memcpy(values, TF_TensorData(terms.get()), sizeof(values));
  name_ = node_.name;
  if (values[0] >= 0) name_ += "." + std::to_string(static_cast<std::int64_t>(values[0]));
  prescale_ = values[1];
  postscale_ = values[2];
  weight_ = values[3];
  return true;
}

void Pending::add_tensor(int index, const void* input, void* output) {
  const auto at = static_cast<std::size_t>(index);
  const char* name = at < node_.names.size() ? node_.names[at].c_str() : node_.name.c_str();
  const int dtype = core_dtype(dtype_);
  tensors_.push_back(
      {name, dtype, node_.wire < 0 ? dtype : node_.wire, static_cast<std::int32_t>(device_),
       static_cast<std::int32_t>(dims_[at].size()), dims_[at].data(), input, output});
}

bool Pending::take_tensors() {
  const OwnedStatus status = new_status();
  const int count = TF_NumInputs(context_) - 1;
  dims_.reserve(static_cast<std::size_t>(count));  // tensors_ points into it
  for (int i = 0; i < count; ++i) {
    OwnedTensor input = input_of(context_, i, status.get());
    if (input == nullptr) break;
    const void* data = TF_TensorData(input.get());
    dtype_ = TF_TensorType(input.get());
    dims_.push_back(dims_of(input.get()));
    input.reset();  // forwarding asks for the only reference
    int forwarded = -1;
    OwnedTensor output(TF_ForwardInputOrAllocateOutput(context_, &i, 1, i, dims_.back().data(),
                                                       static_cast<int>(dims_.back().size()),
                                                       &forwarded, status.get()));
    if (output == nullptr) break;
    g_outputs.fetch_add(1, std::memory_order_relaxed);
    if (forwarded >= 0) {
      g_forwarded.fetch_add(1, std::memory_order_relaxed);
    } else {
      held_.push_back(input_of(context_, i, status.get()));
    }
    add_tensor(i, data, TF_TensorData(output.get()));
    held_.push_back(std::move(output));
  }
  if (TF_GetCode(status.get()) == TF_OK) return true;
  fail(TF_GetCode(status.get()), TF_Message(status.get()));
  return false;
}

bool Pending::take_inputs(int count) {
  const OwnedStatus status = new_status();
  dims_.reserve(static_cast<std::size_t>(count));  // tensors_ points into it
  for (int i = 0; i < count; ++i) {
    OwnedTensor input = input_of(context_, i, status.get());
    if (input == nullptr) {
      fail(TF_GetCode(status.get()), TF_Message(status.get()));
      return false;
    }
    dtype_ = TF_TensorType(input.get());
    dims_.push_back(dims_of(input.get()));
    add_tensor(i, TF_TensorData(input.get()), nullptr);
    held_.push_back(std::move(input));
  }
  return true;
}

bool Pending::take_splits() {
  const OwnedStatus status = new_status();
  const OwnedTensor splits = input_of(context_, 1, status.get());
  if (splits == nullptr || TF_NumDims(splits.get()) != 1) {
    fail(TF_INVALID_ARGUMENT, "splits are a vector");
    return false;
  }
  splits_.resize(static_cast<std::size_t>(TF_Dim(splits.get(), 0)));
  if (!splits_.empty()) {
    std::memcpy(splits_.data(), TF_TensorData(splits.get()), splits_.size() * sizeof(std::int64_t));
  }
  return true;
}

bool Pending::take(Kind kind) {
  switch (kind) {
    case Kind::kAllreduce:
    case Kind::kBroadcast:
      return take_tensors();
    case Kind::kAlltoall:
      return take_inputs(1) && take_splits();
    default:
      return take_inputs(TF_NumInputs(context_) - 1);
  }
}

void Pending::start(std::unique_ptr<Pending> self, Kind kind) {
  const bool ready = self->read_terms() && self->take(kind);
  ready ? submit(std::move(self), kind) : finish(std::move(self));
}

void Pending::submit(std::unique_ptr<Pending> self, Kind kind) {
  const bool scales = kind == Kind::kAllreduce || kind == Kind::kReducescatter;
  self->kind_ = kind;
  HvdliteCall call{};
  call.kind = static_cast<std::int32_t>(kind);
  call.op = self->node_.op;
  call.root = kind == Kind::kBroadcast ? self->node_.root : -1;
  call.process_set = static_cast<std::uint32_t>(self->node_.process_set);
  call.prescale = scales ? self->prescale_ : 1.0;
  call.postscale = scales ? self->postscale_ : 1.0;
  call.weight = kind == Kind::kAllreduce ? self->weight_ : std::nan("");
  call.name = self->name_.c_str();
  call.count = static_cast<std::int32_t>(self->tensors_.size());
  call.tensors = self->tensors_.data();
  call.stream = self->stream_;
  call.split_count = static_cast<std::int32_t>(self->splits_.size());
  call.splits = self->splits_.data();
  call.done = &Pending::on_result;
  call.context = self.release();  // on_result takes it back
  tensorflow::submit(call);
}

void Pending::on_result(void* self, const HvdliteResult* result) {
  std::unique_ptr<Pending> pending(static_cast<Pending*>(self));
  if (result->code != 0) {
    pending->fail(code_of(*result), result->message);
  } else if (result->count > 0) {
    pending->write_received(*result);
  }
  finish(std::move(pending));
}

void Pending::write_received(const HvdliteResult& result) {
  for (int i = 0; i < result.count; ++i) {
    if (!write_rows(result, i)) return;
  }
  if (kind_ == Kind::kReducescatter) return;
  const OwnedStatus status = new_status();
  const std::int64_t dims[] = {result.count, result.parts};
  const bool table = kind_ == Kind::kAllgather;
  const std::size_t bytes = sizeof(std::int64_t) * static_cast<std::size_t>(dims[0] * dims[1]);
  const OwnedTensor sizes(TF_AllocateOutput(context_, result.count, TF_INT64,
                                            table ? dims : dims + 1, table ? 2 : 1, bytes,
                                            status.get()));
  if (sizes == nullptr) return fail(TF_GetCode(status.get()), TF_Message(status.get()));
  std::memcpy(TF_TensorData(sizes.get()), result.first_dimensions, bytes);
}

bool Pending::write_rows(const HvdliteResult& result, int index) {
  const OwnedStatus status = new_status();
  std::vector<std::int64_t> dims = dims_[static_cast<std::size_t>(index)];
  const std::int64_t* rows = result.first_dimensions + std::ptrdiff_t{index} * result.parts;
  dims[0] = std::accumulate(rows, rows + result.parts, std::int64_t{0});
  const OwnedTensor output(TF_AllocateOutput(context_, index, dtype_, dims.data(),
                                             static_cast<int>(dims.size()),
                                             result.output_bytes[index], status.get()));
  if (output == nullptr) {
    fail(TF_GetCode(status.get()), TF_Message(status.get()));
    return false;
  }
  if (result.copy_output(&result, index, TF_TensorData(output.get()))) return true;
  fail(TF_INTERNAL, "the result cannot be copied on the GPU");
  return false;
}

void Pending::fail(TF_Code code, const std::string& message) {
  const OwnedStatus status = new_status();
  TF_SetStatus(status.get(), code, message.c_str());
  TF_OpKernelContext_Failure(context_, status.get());
}

void Pending::finish(std::unique_ptr<Pending> self) {
  std::function<void()> done = std::move(self->done_);
  self.reset();  // TensorFlow may free the step's memory as soon as it is told
  TF_RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&done));
}

}  // namespace hvdlite::tensorflow

void hvdlite_tensorflow_forwarded(std::uint64_t* forwarded, std::uint64_t* outputs) {
  *forwarded = hvdlite::tensorflow::g_forwarded.load();
  *outputs = hvdlite::tensorflow::g_outputs.load();
}
