// The collectives of rows, whose results have a size that the submitter may not know,
// and those that only copy: broadcasts and sends.
#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>

#include "base/fd.h"
#include "engine/entry.h"
#include "engine/executor.h"

namespace hvdlite {
namespace {

std::span<const std::byte> bytes_of(const void* data, std::uint64_t count) {
  return {static_cast<const std::byte*>(data), count};
}

// Elements of one row: the shape without its first dimension.
std::uint64_t row_elements(const TensorShape& tensor) {
  std::uint64_t elements = 1;
  for (std::size_t i = 1; i < tensor.dims.size(); ++i) {
    elements *= static_cast<std::uint64_t>(tensor.dims[i]);
  }
  return elements;
}

// Takes rows by position in the set, and returns bytes by member that is present.
std::vector<std::size_t> bytes_of_rows(const TensorShape& tensor,
                                       std::span<const std::int64_t> rows,
                                       const Presence& present) {
  const std::uint64_t row_bytes = row_elements(tensor) * size_of(tensor.dtype);
  std::vector<std::size_t> bytes;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (present[i]) bytes.push_back(static_cast<std::uint64_t>(rows[i]) * row_bytes);
  }
  return bytes;
}

std::size_t sum(std::span<const std::size_t> bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
}

// The rows of a reducescatter's tensor by member that is present. Without splits the first members
// get one more where the rows do not divide.
std::vector<std::int64_t> scattered_rows(const Request& request, std::size_t tensor,
                                         const Presence& present) {
  std::vector<std::int64_t> result;
  if (!request.splits.empty()) {
    for (std::size_t i = 0; i < present.size(); ++i) {
      if (present[i]) result.push_back(request.splits[tensor * present.size() + i]);
    }
    return result;
  }
  const std::int64_t rows = request.tensors[tensor].dims[0];
  const std::int64_t parts = std::count(present.begin(), present.end(), true);
  for (std::int64_t i = 0; i < parts; ++i) result.push_back(rows / parts + (i < rows % parts));
  return result;
}

// The peers are in the collective already: without this rank it cannot end well for anybody.
Status no_memory(const Entry& entry, std::size_t bytes, int rank, const std::string& why = "") {
  return Status(StatusCode::kInternal, describe(entry.request) + ": no memory for the " +
                                           std::to_string(bytes) + " bytes of its result on rank " +
                                           std::to_string(rank) + why +
                                           "; it holds the rows of every rank");
}

// This rank alone did not know how much it receives; the others have their results.
Status misfit(const Entry& entry, std::size_t tensor, std::size_t bytes, int rank) {
  const std::string& own = entry.request.tensors[tensor].name;
  return invalid_call(entry.request,
                      "rank " + std::to_string(rank) + " receives " + std::to_string(bytes) +
                          " bytes for tensor '" + (own.empty() ? entry.request.name : own) +
                          "', and gave memory for " + std::to_string(entry.capacity(tensor)) +
                          "; give memory for what all ranks send, or send less");
}

// Whether a result in this memory would overwrite an input of a tensor of the entry: that tensor's
// own input may lie at `own_part` of its result, where it is the same bytes.
bool is_input(const Entry& entry, std::size_t tensor, std::span<const std::byte> memory,
              std::ptrdiff_t own_part) {
  const std::less<> before;
  for (std::size_t i = 0; i < entry.request.tensors.size(); ++i) {
    const auto input = bytes_of(entry.inputs[i], entry.request.tensors[i].bytes());
    if (i == tensor && own_part >= 0 && input.data() == memory.data() + own_part) continue;
    if (before(input.data(), memory.data() + memory.size()) &&
        before(memory.data(), input.data() + input.size())) {
      return true;
    }
  }
  return false;
}

}  // namespace

Result<std::byte*> Executor::add_output(const Entry& entry, std::size_t bytes,
                                        std::ptrdiff_t own_part) {
  const std::size_t tensor = entry.completion->outputs.size();
  Completion::Output& output = entry.completion->outputs.emplace_back();
  output.bytes = bytes;
  if (entry.request.tensors[tensor].device == DeviceType::kHost) {
    if (entry.capacity(tensor) >= std::max<std::size_t>(bytes, 1)) {
      auto* given = static_cast<std::byte*>(entry.outputs[tensor]);
      if (!is_input(entry, tensor, {given, bytes}, own_part)) return given;
    }
    output.data.reset(new (std::nothrow) std::byte[bytes]);
    if (output.data == nullptr) return no_memory(entry, bytes, parts_.rank);
    prefer_huge_pages(output.data.get(), bytes);
    return output.data.get();
  }
  Result<DeviceMemory> memory = parts_.gpus.allocate(entry.gpu->ordinal, bytes);
  if (!memory.ok()) {
    return no_memory(entry, bytes, parts_.rank, " (" + memory.status().message() + ")");
  }
  output.device = std::move(memory.value());
  output.pool = parts_.gpus.pool(entry.gpu->ordinal);
  return reinterpret_cast<std::byte*>(output.device.address());  // NOLINT: a device address
}

void Executor::settle_outputs(const Entry& entry) {
  Completion& completion = *entry.completion;
  for (std::size_t i = 0; i < entry.capacities.size(); ++i) {
    Completion::Output& output = completion.outputs[i];
    if (output.data == nullptr || entry.capacities[i] == 0) continue;
    if (entry.capacities[i] < output.bytes) {
      if (completion.misfit.ok()) completion.misfit = misfit(entry, i, output.bytes, parts_.rank);
      continue;
    }
    if (output.bytes > 0) std::memcpy(entry.outputs[i], output.data.get(), output.bytes);
    output.data.reset();
  }
}

Status Executor::allgather() {
  const Entry& entry = *first().entry;
  const std::span<const std::int64_t> rows(first().first_dimensions);
  const std::size_t size = members_->present.size();
  const std::size_t tensors = entry.request.tensors.size();
  const auto self = static_cast<std::size_t>(members_->group.index_of(parts_.rank));
  entry.completion->first_dimensions = first().first_dimensions;
  std::vector<std::vector<std::size_t>> bytes;  // Each tensor has a list.
  bytes.reserve(tensors);
  std::vector<Allgather> calls;
  for (std::size_t i = 0; i < tensors; ++i) {
    const TensorShape& tensor = entry.request.tensors[i];
    bytes.push_back(bytes_of_rows(tensor, rows.subspan(i * size, size), members_->present));
    const std::size_t total = sum(bytes[i]);
    const std::size_t own_part = sum({bytes[i].begin(), self});
    HVDLITE_ASSIGN_OR_RETURN(std::byte* const output,
                             add_output(entry, total, static_cast<std::ptrdiff_t>(own_part)));
    calls.push_back(
        {members_->group, bytes_of(entry.inputs[i], tensor.bytes()), bytes[i], {output, total}});
  }
  // Tensors that follow each other on the same data plane travel together.
  for (std::size_t i = 0; i < tensors;) {
    const DeviceType device = entry.request.tensors[i].device;
    std::size_t end = i + 1;
    while (end < tensors && entry.request.tensors[end].device == device) ++end;
    Backend& plane = plane_of(device);
    HVDLITE_RETURN_IF_ERROR(
        end == i + 1 ? plane.allgather(calls[i], patience_)
                     : plane.allgathers(std::span(calls).subspan(i, end - i), patience_));
    i = end;
  }
  settle_outputs(entry);
  return Status();
}

Status Executor::reducescatter() {
  const Entry& entry = *first().entry;
  const Group& group = members_->group;
  const Request& request = entry.request;
  const auto self = static_cast<std::size_t>(group.index_of(parts_.rank));
  for (std::size_t i = 0; i < request.tensors.size(); ++i) {
    const TensorShape& tensor = request.tensors[i];
    const auto rows = scattered_rows(request, i, members_->present);
    std::vector<std::uint64_t> counts;
    for (const std::int64_t count : rows) {
      counts.push_back(static_cast<std::uint64_t>(count) * row_elements(tensor));
    }
    const std::size_t bytes = counts[self] * size_of(tensor.dtype);
    HVDLITE_ASSIGN_OR_RETURN(std::byte* const output, add_output(entry, bytes));
    entry.completion->first_dimensions.push_back(rows[self]);
    const Piece piece{entry.inputs[i], output, tensor.count(), request.prescale, request.postscale};
    const Reducescatter call{group, reduced_as(tensor.dtype), reduced_by(tensor.dtype, request.op),
                             piece, counts};
    HVDLITE_RETURN_IF_ERROR(plane_of(tensor.device).reducescatter(call, patience_));
  }
  settle_outputs(entry);
  return Status();
}

Status Executor::alltoall() {
  const Entry& entry = *first().entry;
  const TensorShape& tensor = entry.request.tensors[0];
  const Presence& present = members_->present;
  const auto sent = bytes_of_rows(tensor, rows_given(entry.request, present), present);
  const auto received = bytes_of_rows(tensor, first().first_dimensions, present);
  const std::size_t total = sum(received);
  entry.completion->first_dimensions = first().first_dimensions;
  HVDLITE_ASSIGN_OR_RETURN(std::byte* const output, add_output(entry, total));
  const Alltoall call{
      members_->group, bytes_of(entry.inputs[0], tensor.bytes()), sent, {output, total}, received};
  HVDLITE_RETURN_IF_ERROR(plane_of(tensor.device).alltoall(call, patience_));
  settle_outputs(entry);
  return Status();
}

Status Executor::send() {
  std::vector<Transfer> transfers;
  for (const TensorRef& ref : batch_->tensors) {
    const Entry& entry = entry_of(ref);
    const Request& request = entry.request;
    const std::uint64_t bytes = request.tensors[ref.tensor].bytes();
    if (request.source() == parts_.rank) {
      transfers.push_back({request.destination(), bytes_of(entry.inputs[ref.tensor], bytes), {}});
    } else {
      auto* output = static_cast<std::byte*>(entry.outputs[ref.tensor]);
      transfers.push_back({request.source(), {}, {output, bytes}});
    }
  }
  return parts_.backend->transfer(transfers, patience_);
}

Status Executor::broadcast() {
  const Entry& entry = *first().entry;
  for (std::size_t i = 0; i < entry.request.tensors.size(); ++i) {
    const TensorShape& tensor = entry.request.tensors[i];
    const std::uint64_t bytes = tensor.bytes();
    const Broadcast call{members_->group,
                         entry.request.root,
                         bytes_of(entry.inputs[i], bytes),
                         {static_cast<std::byte*>(entry.outputs[i]), bytes}};
    HVDLITE_RETURN_IF_ERROR(plane_of(tensor.device).broadcast(call, patience_));
  }
  return Status();
}

}  // namespace hvdlite
