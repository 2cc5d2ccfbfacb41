#include "tensorflow/kernels.h"

#include <memory>
#include <string_view>

#include "base/config.h"
#include "tensorflow/attachment.h"
#include "tensorflow/gpu_stream.h"
#include "tensorflow/pending.h"
#include "tensorflow/tf_status.h"

namespace hvdlite::tensorflow {
namespace {

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
  return node.release();  // destroy_node takes it back
}

void destroy_node(void* node) { delete static_cast<Node*>(node); }

template <void (*start)(std::unique_ptr<Pending>)>
void compute(void* node, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  start(std::make_unique<Pending>(*static_cast<Node*>(node), context, done, DeviceType::kHost,
                                  nullptr));
}

template <void (*start)(std::unique_ptr<Pending>)>
void compute_on_gpu(void* node, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  start(std::make_unique<Pending>(*static_cast<Node*>(node), context, done, DeviceType::kGpu,
                                  stream_of(context)));
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
  return query.release();  // destroy_query takes it back
}

void destroy_query(void* query) { delete static_cast<Query*>(query); }

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
      TF_NewAsyncKernelBuilder(op.name, device, op.create, compute, &destroy_node);
  for (const char* argument : op.on_host) TF_KernelBuilder_HostMemory(kernel, argument);
  TF_RegisterKernelBuilder(op.name, kernel, status.get());
  warn_unless_ok(status.get(), op.name);
}

// A knob that cannot be read is an error of init().
bool has_kernels_for_gpus() {
  static const Result<Config> config = Config::from_environment();
  return config.ok() && config.value().tensorflow_gpu != 0 && can_tell_streams();
}

template <void (*start)(std::unique_ptr<Pending>)>
void register_op(const AsyncOp& op) {
  register_async(op, "CPU", &compute<start>);
  if (has_kernels_for_gpus()) register_async(op, "GPU", &compute_on_gpu<start>);
}

void register_query(const char* device) {
  const OwnedStatus status = new_status();
  TF_KernelBuilder* query =
      TF_NewKernelBuilder(kQueryOp, device, &create_query, &compute_query, &destroy_query);
  for (const char* argument : {"terms", "value"}) TF_KernelBuilder_HostMemory(query, argument);
  TF_RegisterKernelBuilder(kQueryOp, query, status.get());
  warn_unless_ok(status.get(), kQueryOp);
}

}  // namespace

void register_kernels() {
  register_op<&Pending::allreduce>(
      {kAllreduceOp, &create_node<Attributes::kOpAndWire, true>, {"terms"}});
  register_op<&Pending::broadcast>(
      {kBroadcastOp, &create_node<Attributes::kRoot, true>, {"terms"}});
  register_op<&Pending::allgather>(
      {kAllgatherOp, &create_node<Attributes::kNone, true>, {"terms", "sizes"}});
  register_op<&Pending::reducescatter>(
      {kReducescatterOp, &create_node<Attributes::kOp, true>, {"terms"}});
  register_op<&Pending::alltoall>({kAlltoallOp,
                                   &create_node<Attributes::kNone, false>,
                                   {"terms", "splits", "received_splits"}});
  register_query("CPU");
  if (has_kernels_for_gpus()) register_query("GPU");
}

}  // namespace hvdlite::tensorflow
