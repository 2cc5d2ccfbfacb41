#include "engine/entry.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace hvdlite {

void Completion::clear_results() {
  first_dimensions.clear();
  outputs.clear();
  misfit = Status();
  set_id = last_joined = -1;
  members = 0;
  on_device = nullptr;
}

Status Completion::copy_output(std::size_t i, void* target, CudaStream stream) {
  Output& from = outputs[i];
  if (!from.device.valid()) {
    if (from.bytes > 0) std::memcpy(target, from.data.get(), from.bytes);
    from.data.reset();
    return Status();
  }
  CudaDevice& device = on_device->device();
  if (from.bytes > 0) {
    const CudaDevice::Current current(device);
    HVDLITE_RETURN_IF_ERROR(
        device.check(device.api().copy(address(target), from.device.address(), from.bytes, stream),
                     "copying a result"));
  }
  HVDLITE_ASSIGN_OR_RETURN(CudaEventPtr copied, device.record(stream));
  from.pool->give_back(std::move(from.device), std::move(copied));
  return Status();
}

Status invalid_call(const Request& request, const std::string& why) {
  return Status(StatusCode::kInvalidArgument, describe(request) + ": " + why);
}

Status duplicate_name(const Request& request) {
  return Status(StatusCode::kDuplicateName,
                describe(request) +
                    ": an operation of this name is already in flight on this rank; wait for it "
                    "first, or give each operation a name of its own");
}

Status of_call(const Request& request, const Status& why) {
  return Status(why.code(), describe(request) + ": " + why.message(), why.failed_rank());
}

namespace {

// "'layer1', of dtype complex64," for a refusal.
std::string described(const Request& request, const TensorShape& tensor) {
  return "'" + request.tensor_name(tensor) + "', of dtype " + std::string(name_of(tensor.dtype)) +
         ",";
}

Status check_wire(const Request& request, const TensorShape& tensor) {
  if (tensor.wire == tensor.dtype) return Status();
  const bool narrow = tensor.wire == DataType::kFloat16 || tensor.wire == DataType::kBfloat16;
  if (request.kind != Kind::kAllreduce || request.op == ReduceOp::kAdasum) {
    return invalid_call(request, "a wire dtype goes with allreduce, and not with Adasum");
  }
  const bool wide = tensor.dtype == DataType::kFloat32 || tensor.dtype == DataType::kFloat64;
  if (narrow && wide) return Status();
  return invalid_call(request,
                      "a wire dtype is float16 or bfloat16, of a float32 or float64 tensor");
}

// A bool is reduced by what leaves a bool.
Status check_logical(const Request& request) {
  if (!is_logical(request.op)) {
    return invalid_call(request, "by " + std::string(name_of(request.op)) +
                                     ", bool cannot be reduced; convert it, for example to uint8, "
                                     "or use min (all) or max (any)");
  }
  if (request.prescale == 1.0 && request.postscale == 1.0) return Status();
  return invalid_call(request, "bool takes no factors; leave prescale and postscale at 1");
}

Status check_reduction(const Request& request, const TensorShape& tensor) {
  if (tensor.dtype == DataType::kBool) return check_logical(request);
  if (!computes(tensor.dtype)) {
    return invalid_call(request, described(request, tensor) + " cannot be reduced by " +
                                     std::string(name_of(request.op)) +
                                     ", only copied; convert it, for example to float16");
  }
  if (request.op == ReduceOp::kAdasum && request.kind == Kind::kReducescatter) {
    return invalid_call(request,
                        "Adasum combines whole tensors; use allreduce, and take a part of it");
  }
  if (request.op == ReduceOp::kAdasum && !is_floating(tensor.dtype)) {
    return invalid_call(request, "Adasum takes floating-point tensors");
  }
  const bool orders = request.op == ReduceOp::kMin || request.op == ReduceOp::kMax;
  if (orders && is_complex(tensor.dtype)) {
    return invalid_call(request,
                        described(request, tensor) + " has no " + std::string(name_of(request.op)) +
                            ": complex numbers have no order; use sum, average or product");
  }
  if (request.weighted && is_integer(tensor.dtype)) {
    return invalid_call(request, "a weighted average takes floating-point tensors");
  }
  return Status();
}

Status check_shape(const Request& request, const TensorShape& tensor) {
  if (tensor.name.size() > kMaxNameBytes) {
    return invalid_call(request, "a name has at most 512 bytes");
  }
  if (tensor.dims.size() > kMaxDimensions) {
    return invalid_call(request, "a tensor has at most 32 dimensions");
  }
  if (!shape_travels(tensor.dims)) {
    return invalid_call(request, described(request, tensor) +
                                     " has dimensions that multiply to more than 2^56, those of 0 "
                                     "left out; reshape it, where it has no elements to [0]");
  }
  const bool scatters = request.kind == Kind::kReducescatter;
  const bool has_rows =
      scatters || request.kind == Kind::kAllgather || request.kind == Kind::kAlltoall;
  if (has_rows && tensor.dims.empty()) {
    return invalid_call(request, "a tensor without dimensions has no rows; reshape it to [1]");
  }
  if (scatters || request.kind == Kind::kAllreduce) {
    HVDLITE_RETURN_IF_ERROR(check_reduction(request, tensor));
  }
  return check_wire(request, tensor);
}

struct Place {
  std::uintptr_t begin;
  std::uintptr_t end;
  std::size_t tensor;
};

std::vector<Place> places_of(const Request& request, std::span<void* const> outputs) {
  std::vector<Place> places;
  for (std::size_t i = 0; i < outputs.size() && i < request.tensors.size(); ++i) {
    const auto begin = reinterpret_cast<std::uintptr_t>(outputs[i]);
    const std::uint64_t bytes = request.tensors[i].bytes();
    if (begin != 0 && bytes > 0) places.push_back({begin, begin + bytes, i});
  }
  std::sort(places.begin(), places.end(),
            [](const Place& a, const Place& b) { return a.begin < b.begin; });
  return places;
}

std::string quoted_name(const Request& request, std::size_t tensor) {
  const std::string& own = request.tensors[tensor].name;
  return own.empty() ? "number " + std::to_string(tensor) : "'" + own + "'";
}

// Memory that two tensors of one reduction write to would be reduced once or twice, as batches and
// chunks fall. In a broadcast both write the same values: tied parameters travel so.
Status check_overlap(const Entry& entry) {
  const Request& request = entry.request;
  if (request.kind != Kind::kAllreduce || request.tensors.size() < 2) return Status();
  const std::vector<Place> places = places_of(request, entry.outputs);
  for (std::size_t i = 1; i < places.size(); ++i) {
    if (places[i].begin >= places[i - 1].end) continue;
    const auto [first, second] = std::minmax(places[i - 1].tensor, places[i].tensor);
    return invalid_call(request, "tensors " + quoted_name(request, first) + " and " +
                                     quoted_name(request, second) +
                                     " overlap in memory, so that one result would overwrite the "
                                     "other; give each tensor once, or a copy");
  }
  return Status();
}

// Where a result may go besides memory that the engine allocates.
Status check_capacities(const Entry& entry) {
  for (std::size_t i = 0; i < entry.capacities.size(); ++i) {
    const bool on_host = entry.request.tensors[i].device == DeviceType::kHost;
    if (entry.capacities[i] == 0 || (on_host && entry.outputs[i] != nullptr)) continue;
    return invalid_call(entry.request,
                        "memory that a caller gives for the result of tensor " +
                            quoted_name(entry.request, i) +
                            " is host memory, at an address; without a capacity the engine "
                            "allocates the result");
  }
  return Status();
}

// The local half of a send's checks: `rank` is one of the two.
Status check_send(const Request& request, const Group& group, int rank) {
  if (request.tensors.size() != 1) return invalid_call(request, "a send takes one tensor");
  if (request.tensors[0].device != DeviceType::kHost) {
    return invalid_call(request,
                        "a send takes a tensor in host memory, and this one is on a GPU; copy it "
                        "to host memory");
  }
  const bool sends = request.source() == rank;
  const int peer = sends ? request.destination() : request.source();
  if (peer == rank) {
    return invalid_call(request, "a rank does not send to itself; copy the tensor");
  }
  if (group.index_of(peer) < 0) {
    return invalid_call(request,
                        "rank " + std::to_string(peer) + " is not a member of " + describe(group));
  }
  return Status();
}

}  // namespace

Status check_entry(const Entry& entry, const GroupPtr& group, int rank) {
  const Request& request = entry.request;
  if (std::max(request.name.size(), request.transaction.size()) > kMaxNameBytes) {
    return invalid_call(request, "a name has at most 512 bytes");
  }
  if (group == nullptr) {
    return invalid_call(request, "there is no process set " + std::to_string(request.process_set) +
                                     "; it was removed, or never added");
  }
  if (group->index_of(rank) < 0) {
    return invalid_call(request,
                        "rank " + std::to_string(rank) + " is not a member of " + describe(*group));
  }
  if (request.name == kJoinName && request.kind != Kind::kJoin) {
    return invalid_call(request, "this name is that of join(); choose another one");
  }
  if (request.kind == Kind::kJoin && request.process_set != 0) {
    return invalid_call(request, "a rank joins the world, not a process set");
  }
  if (request.kind == Kind::kBroadcast && group->index_of(request.root) < 0) {
    return invalid_call(request, "the root rank " + std::to_string(request.root) +
                                     " is not a member of " + describe(*group));
  }
  if (request.is_send()) HVDLITE_RETURN_IF_ERROR(check_send(request, *group, rank));
  if (!std::isfinite(request.prescale) || !std::isfinite(request.postscale)) {
    return invalid_call(request, "prescale and postscale factors are finite numbers");
  }
  if (request.weighted && request.op != ReduceOp::kAverage) {
    return invalid_call(request, "a weight goes with the average op only");
  }
  if (!std::isfinite(entry.weight) || entry.weight < 0) {
    return invalid_call(request, "a weight is a finite number, zero or more");
  }
  for (const TensorShape& tensor : request.tensors) {
    HVDLITE_RETURN_IF_ERROR(check_shape(request, tensor));
    if (tensor.device == DeviceType::kGpu && !entry.gpu) {
      return invalid_call(request, "a GPU tensor comes without its device and stream");
    }
  }
  HVDLITE_RETURN_IF_ERROR(check_capacities(entry));
  return check_overlap(entry);
}

Result<TensorShape> make_shape(std::string name, int dtype, int wire,
                               std::vector<std::int64_t> dims) {
  for (const int number : {dtype, wire}) {
    if (is_valid_dtype(number)) continue;
    return Status(
        StatusCode::kInvalidArgument,
        "'" + name + "' is of a dtype that cannot be sent (number " + std::to_string(number) + ")");
  }
  for (const std::int64_t dim : dims) {
    if (dim < 0)
      return Status(StatusCode::kInvalidArgument, "'" + name + "' has a negative dimension");
  }
  TensorShape shape;
  shape.name = std::move(name);
  shape.dtype = static_cast<DataType>(dtype);
  shape.dims = std::move(dims);
  shape.wire = static_cast<DataType>(wire);
  return shape;
}

EntryBuilder::EntryBuilder(Kind kind, std::string name, std::uint32_t process_set) {
  entry_->request.kind = kind;
  entry_->request.name = std::move(name);
  entry_->request.process_set = process_set;
}

void EntryBuilder::refuse(const std::string& why) {
  if (wrong_.ok()) wrong_ = invalid_call(entry_->request, why);
}

Status EntryBuilder::refused(const Status& why) const { return of_call(entry_->request, why); }

EntryBuilder& EntryBuilder::reduce(int op, double prescale, double postscale) {
  if (!is_valid_op(op)) {
    refuse("op " + std::to_string(op) + " is unknown");
    return *this;
  }
  entry_->request.op = static_cast<ReduceOp>(op);
  entry_->request.prescale = prescale;
  entry_->request.postscale = postscale;
  return *this;
}

EntryBuilder& EntryBuilder::weigh(std::optional<double> weight) {
  entry_->request.weighted = weight.has_value();
  entry_->weight = weight.value_or(1.0);
  return *this;
}

EntryBuilder& EntryBuilder::late(LateTerms terms, bool skips) {
  entry_->request.late = std::move(terms);
  entry_->request.weighted = true;
  entry_->skips = skips;
  if (skips) entry_->weight = 0;
  return *this;
}

EntryBuilder& EntryBuilder::tensor(TensorShape shape, const void* input, void* output, int gpu,
                                   CudaStream stream) {
  if (gpu != kHostMemory) {
    shape.device = DeviceType::kGpu;
    if (entry_->gpu && entry_->gpu->ordinal != gpu) {
      refuse("its tensors are on GPU " + std::to_string(entry_->gpu->ordinal) + " and on GPU " +
             std::to_string(gpu) + "; send them one by one");
    }
    entry_->gpu = GpuSource{gpu, stream, nullptr};
  }
  entry_->request.tensors.push_back(std::move(shape));
  entry_->inputs.push_back(input);
  entry_->outputs.push_back(output);
  return *this;
}

EntryBuilder& EntryBuilder::capacity(std::uint64_t bytes) {
  if (bytes == 0) return *this;
  entry_->capacities.resize(entry_->request.tensors.size());
  entry_->capacities.back() = bytes;
  return *this;
}

Result<EntryPtr> EntryBuilder::build() {
  if (!wrong_.ok()) return wrong_;
  return std::move(entry_);
}

}  // namespace hvdlite
