#include "engine/entry_builder.h"

#include "engine/entry_check.h"

namespace hvdlite {

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
