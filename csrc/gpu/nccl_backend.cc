#include "gpu/nccl_backend.h"

#include <algorithm>
#include <numeric>
#include <thread>

#include "gpu/device_backend.h"

namespace hvdlite {
namespace {

constexpr int kBytes = 1;  // ncclUint8

// NCCL's numbers of average, sum, Adasum (which goes through the host), min, max and product.
int nccl_op(ReduceOp op) {
  constexpr int kOps[] = {4, 0, 0, 3, 2, 1};
  return kOps[static_cast<int>(op)];
}

using namespace std::chrono_literals;

// The time between two looks at NCCL, whose own threads wake nobody.
constexpr auto kPollInterval = 500us;
// The time to wait for the fabric's word on a lost peer: NCCL may see the loss first.
constexpr auto kGoodbyeTime = 500ms;

bool is_success(NcclResult result) { return result == NcclResult::kSuccess; }
bool is_accepted(NcclResult result) {
  return is_success(result) || result == NcclResult::kInProgress;
}

}  // namespace

Result<std::unique_ptr<NcclBackend>> NcclBackend::connect(std::shared_ptr<const NcclApi> api,
                                                          Membership membership,
                                                          DeviceWorkspace& workspace, Backend& host,
                                                          const NcclUniqueId& id, bool fused,
                                                          Patience patience) {
  std::unique_ptr<NcclBackend> made(
      new NcclBackend(std::move(api), std::move(membership), workspace, host, fused));
  const CudaDevice::Current current(made->device());
  NcclConfig config;
  const NcclResult result =
      made->api_->comm_init(&made->comm_, made->size(), id, made->index(), &config);
  HVDLITE_RETURN_IF_ERROR(made->await(result, "starting NCCL", patience));
  // Without a registration NCCL copies through buffers of its own, which is only slower.
  if (fused) (void)made->know_memory(workspace.fusion.address(), workspace.fusion.bytes());
  return made;
}

Status NcclBackend::allgather(const Allgather& call, Patience patience) {
  const std::span<const std::byte> input = call.input;
  const std::span<const std::size_t> bytes = call.bytes;
  const std::span<std::byte> output = call.output;
  if (output.empty()) return Status();
  const bool even = std::all_of(bytes.begin(), bytes.end(),
                                [&](std::size_t count) { return count == bytes.front(); });
  if (even) {
    return enqueue("an allgather", patience, [&] {
      return api_->allgather(input.data(), output.data(), bytes.front(), kBytes, comm_, stream());
    });
  }
  return enqueue("an allgather", patience, [&] {
    std::size_t offset = 0;
    int root = -1;
    return for_all(bytes, [&](std::size_t count) {
      std::byte* block = output.data() + offset;
      offset += count;
      ++root;
      if (count == 0) return NcclResult::kSuccess;
      const void* source = root == index() ? static_cast<const void*>(input.data()) : block;
      return api_->broadcast(source, block, count, kBytes, root, comm_, stream());
    });
  });
}

Status NcclBackend::broadcast(const Broadcast& call, Patience patience) {
  if (call.output.empty()) return Status();
  return enqueue("a broadcast", patience, [&] {
    return api_->broadcast(call.input.data(), call.output.data(), call.output.size(), kBytes,
                           call.group.index_of(call.root), comm_, stream());
  });
}

Status NcclBackend::alltoall(const Alltoall& call, Patience patience) {
  return enqueue("an alltoall", patience, [&] {
    const std::byte* from = call.input.data();
    std::byte* to = call.output.data();
    int peer = -1;
    return for_all(call.send_bytes, [&](std::size_t sent) {
      const std::size_t received = call.receive_bytes[++peer];
      const std::byte* part = std::exchange(from, from + sent);
      std::byte* place = std::exchange(to, to + received);
      NcclResult result = NcclResult::kSuccess;
      if (sent > 0) {
        result = api_->send(part, sent, kBytes, peer, comm_, stream());
      }
      if (received > 0 && (result == NcclResult::kSuccess || result == NcclResult::kInProgress)) {
        result = api_->recv(place, received, kBytes, peer, comm_, stream());
      }
      return result;
    });
  });
}

Status NcclBackend::allreduce(const Allreduce& call, Patience patience) {
  const auto& [group, types, op, pieces] = call;
  if (op == ReduceOp::kAdasum || !runs_on_device(group, types, op, pieces)) {
    StagedBackend through_host(workspace_, host_, membership_.fabric.topology.rank);
    return through_host.allreduce(call, patience);
  }
  if (is_complex(types.memory)) {
    return allreduce({group, component_of(types.memory), op, parts_of_complex(pieces)}, patience);
  }
  if (op == ReduceOp::kAverage && group.average_over > 0) {
    return allreduce({group, types, ReduceOp::kSum, shares(group, pieces)}, patience);
  }
  return reduce(types, op, pieces, patience);
}

Status NcclBackend::reduce(ElementTypes types, ReduceOp op, std::span<const Piece> pieces,
                           Patience patience) {
  const auto elements = [](const Piece& piece) { return piece.count > 0; };
  const auto filled = std::count_if(pieces.begin(), pieces.end(), elements);
  if (filled == 0) return Status();
  if (fused_ && (filled > 1 || types.cast())) return reduce_fused(types, op, pieces, patience);
  // Without a buffer to cast into, tensors travel as they are.
  if (filled > 1) return reduce_in_place(types.memory, op, pieces, patience);
  const Piece& piece = *std::find_if(pieces.begin(), pieces.end(), elements);
  return reduce_one(types.memory, op, piece, patience);
}

Status NcclBackend::reduce_fused(ElementTypes types, ReduceOp op, std::span<const Piece> pieces,
                                 Patience patience) {
  const auto rounds = lay_out(pieces, size_of(types.wire), workspace_.fusion.bytes());
  for (const FusedRound& round : rounds) {
    HVDLITE_RETURN_IF_ERROR(reduce_round(types, op, pieces, round, patience));
  }
  return Status();
}

Status NcclBackend::reduce_round(ElementTypes types, ReduceOp op, std::span<const Piece> pieces,
                                 const FusedRound& round, Patience patience) {
  const CudaPointer area = gradient_memory_of(types, pieces, round);
  const CudaPointer buffer = area != 0 ? area : workspace_.fusion.address();
  HVDLITE_RETURN_IF_ERROR(pack(types, pieces, round, buffer));
  HVDLITE_RETURN_IF_ERROR(enqueue(kAllreduce, patience, [&] {
    return api_->allreduce(pointer(buffer), pointer(buffer), round.bytes / size_of(types.wire),
                           nccl_dtype(types.wire), nccl_op(op), comm_, stream());
  }));
  return unpack(types, pieces, round, buffer);
}

Status NcclBackend::reduce_one(DataType dtype, ReduceOp op, const Piece& piece, Patience patience) {
  // Other members may have no gradient memory, so all members call the same op once.
  const FusedRound whole{{{0, 0, piece.count, 0}}, piece.count * size_of(dtype)};
  if (piece.prescale != 1.0 || piece.own_scale ||
      gradient_memory_of(dtype, {&piece, 1}, whole) == 0) {
    return reduce_in_place(dtype, op, {&piece, 1}, patience);
  }
  return reduce_round(dtype, op, {&piece, 1}, whole, patience);
}

CudaPointer NcclBackend::gradient_memory_of(ElementTypes types, std::span<const Piece> pieces,
                                            const FusedRound& round) {
  const auto output_of = [&](const FusedPart& part) {
    return address(pieces[part.piece].output) + part.begin * size_of(types.memory);
  };
  const CudaPointer begin = output_of(round.parts.front());
  if (types.cast() || begin % kFusionAlign != 0) return 0;
  const GradientMemory::Area area = workspace_.gradients->find(begin);
  if (begin + round.bytes > area.address + area.bytes) return 0;
  const bool as_laid_out =
      std::all_of(round.parts.begin(), round.parts.end(),
                  [&](const FusedPart& part) { return output_of(part) == begin + part.offset; });
  return as_laid_out && know_memory(area.address, area.bytes) ? begin : 0;
}

Status NcclBackend::pack(ElementTypes types, std::span<const Piece> pieces, const FusedRound& round,
                         CudaPointer buffer) {
  const CudaDevice::Current current(device());
  segments_.clear();
  for (const FusedPart& part : round.parts) {
    const Piece& piece = pieces[part.piece];
    const CudaPointer place = buffer + part.offset;
    if (piece.input == nullptr) {
      HVDLITE_RETURN_IF_ERROR(device().zero(place, part.count * size_of(types.wire)));
      continue;
    }
    const CudaPointer from = address(piece.input) + part.begin * size_of(types.memory);
    if (from != place || piece.prescale != 1.0) {
      segments_.push_back({from, place, part.count, piece.prescale});
    }
  }
  return workspace_.copies->enqueue(types.memory, types.wire, segments_);
}

Status NcclBackend::unpack(ElementTypes types, std::span<const Piece> pieces,
                           const FusedRound& round, CudaPointer buffer) {
  segments_.clear();
  for (const FusedPart& part : round.parts) {
    const Piece& piece = pieces[part.piece];
    const CudaPointer to = address(piece.output) + part.begin * size_of(types.memory);
    const CudaPointer from = buffer + part.offset;
    if (from != to || piece.postscale != 1.0) {
      segments_.push_back({from, to, part.count, piece.postscale});
    }
  }
  return workspace_.copies->enqueue(types.wire, types.memory, segments_);
}

Status NcclBackend::reduce_in_place(DataType dtype, ReduceOp op, std::span<const Piece> pieces,
                                    Patience patience) {
  std::vector<Direct> calls;
  Status status;
  for (const Piece& piece : pieces) {
    if (piece.count == 0) continue;
    Result<Direct> call = prepare(dtype, op, piece);
    status = call.status();
    if (!status.ok()) break;
    calls.push_back(call.value());
  }
  if (status.ok()) {
    status = enqueue(kAllreduce, patience, [&] {
      return for_all(calls, [&](const Direct& call) {
        return api_->allreduce(call.input, call.output, call.count, nccl_dtype(dtype), call.op,
                               comm_, stream());
      });
    });
  }
  for (const Direct& call : calls) {
    if (call.own_op) (void)api_->op_destroy(call.op, comm_);
  }
  return status.ok() ? scale_outputs(dtype, pieces) : status;
}

Result<NcclBackend::Direct> NcclBackend::prepare(DataType dtype, ReduceOp op, const Piece& piece) {
  const CudaDevice::Current current(device());
  Direct call{piece.input, piece.output, piece.count, nccl_op(op), false};
  if (piece.input == nullptr) {
    call.input = piece.output;
    HVDLITE_RETURN_IF_ERROR(device().zero(address(piece.output), piece.count * size_of(dtype)));
  }
  // Every member chooses the same op, even if its own factor is 1.
  const bool scaled = piece.prescale != 1.0 || piece.own_scale;
  const bool linear = op == ReduceOp::kSum || op == ReduceOp::kAverage;
  // NCCL would round the factor to 16 bits.
  const bool wide = dtype == DataType::kFloat32 || dtype == DataType::kFloat64;
  const bool by_op = scaled && linear && wide;
  if (piece.input != nullptr && scaled && !by_op) {
    const CopySegment moved{address(piece.input), address(piece.output), piece.count,
                            piece.prescale};
    HVDLITE_RETURN_IF_ERROR(workspace_.copies->enqueue(dtype, dtype, {&moved, 1}));
    call.input = piece.output;
  }
  if (!by_op) return call;
  const double share = op == ReduceOp::kAverage ? piece.prescale / size() : piece.prescale;
  HVDLITE_ASSIGN_OR_RETURN(call.op, make_scaled_sum(dtype, share));
  call.own_op = true;
  return call;
}

Status NcclBackend::scale_outputs(DataType dtype, std::span<const Piece> pieces) {
  segments_.clear();
  for (const Piece& piece : pieces) {
    if (piece.count == 0 || piece.postscale == 1.0) continue;
    segments_.push_back(
        {address(piece.output), address(piece.output), piece.count, piece.postscale});
  }
  if (segments_.empty()) return Status();
  return workspace_.copies->enqueue(dtype, dtype, segments_);
}

Status NcclBackend::reducescatter(const Reducescatter& call, Patience patience) {
  const auto& [group, dtype, op, piece, counts] = call;
  if (piece.count == 0) return Status();
  if (!runs_on_device(group, dtype, op, {&piece, 1})) {
    StagedBackend through_host(workspace_, host_, membership_.fabric.topology.rank);
    return through_host.reducescatter(call, patience);
  }
  if (is_complex(dtype)) {
    std::vector<std::uint64_t> twice(counts.begin(), counts.end());
    for (std::uint64_t& count : twice) count *= 2;
    const std::vector<Piece> parts = parts_of_complex({&piece, 1});
    return reducescatter({group, component_of(dtype), op, parts[0], twice}, patience);
  }
  if (op == ReduceOp::kAverage && group.average_over > 0) {
    const std::vector<Piece> share = shares(group, {&piece, 1});
    return reducescatter({group, dtype, ReduceOp::kSum, share[0], counts}, patience);
  }
  if (piece.prescale == 1.0) {
    HVDLITE_RETURN_IF_ERROR(scatter(dtype, op, piece.input, piece.output, counts, patience));
    const Piece block{nullptr, piece.output, counts[index()], 1.0, piece.postscale};
    return scale_outputs(dtype, {&block, 1});
  }
  // The input is not ours to overwrite.
  const std::uint64_t bytes = piece.count * size_of(dtype);
  HVDLITE_ASSIGN_OR_RETURN(DeviceMemory memory, workspace_.pool->take(bytes));
  const CudaPointer scratch = memory.address();
  const CopySegment in{address(piece.input), scratch, piece.count, piece.prescale};
  HVDLITE_RETURN_IF_ERROR(workspace_.copies->enqueue(dtype, dtype, {&in, 1}));
  const std::uint64_t before = std::accumulate(counts.begin(), counts.begin() + index(), 0ULL);
  const CudaPointer block = scratch + before * size_of(dtype);  // in place, as NCCL allows
  HVDLITE_RETURN_IF_ERROR(scatter(dtype, op, pointer(scratch), pointer(block), counts, patience));
  const CopySegment out{block, address(piece.output), counts[index()], piece.postscale};
  HVDLITE_RETURN_IF_ERROR(workspace_.copies->enqueue(dtype, dtype, {&out, 1}));
  HVDLITE_ASSIGN_OR_RETURN(CudaEventPtr after, record());
  workspace_.pool->give_back(std::move(memory), after);
  return Status();
}

Status NcclBackend::scatter(DataType dtype, ReduceOp op, const void* input, void* output,
                            std::span<const std::uint64_t> counts, Patience patience) {
  const bool even = std::all_of(counts.begin(), counts.end(),
                                [&](std::uint64_t count) { return count == counts.front(); });
  return enqueue(kReducescatter, patience, [&] {
    if (even) {
      return api_->reducescatter(input, output, counts.front(), nccl_dtype(dtype), nccl_op(op),
                                 comm_, stream());
    }
    const auto* block = static_cast<const std::byte*>(input);
    int root = -1;
    return for_all(counts, [&](std::uint64_t count) {
      const void* source = block;
      block += count * size_of(dtype);
      ++root;
      if (count == 0) return NcclResult::kSuccess;
      return api_->reduce(source, output, count, nccl_dtype(dtype), nccl_op(op), root, comm_,
                          stream());
    });
  });
}

Status NcclBackend::enqueue(const char* operation, Patience patience,
                            const std::function<NcclResult()>& calls) {
  const CudaDevice::Current current(device());
  NcclResult result = api_->group_start();
  if (!is_success(result)) return failure(result, operation);
  const NcclResult called = calls();
  result = api_->group_end();  // also after an error, or the thread would stay in the group
  return await(is_accepted(called) ? result : called, operation, patience);
}

Result<int> NcclBackend::make_scaled_sum(DataType dtype, double factor) {
  int op = 0;
  float narrow = static_cast<float>(factor);
  void* scalar = dtype == DataType::kFloat64 ? static_cast<void*>(&factor) : &narrow;
  const NcclResult result =
      api_->premul_create(&op, scalar, nccl_dtype(dtype), kNcclScalarHostImmediate, comm_);
  if (!is_success(result)) return failure(result, "making a scaled sum");
  return op;
}

Status NcclBackend::await(NcclResult result, const char* operation, Patience patience) {
  if (is_success(result)) return Status();
  if (result != NcclResult::kInProgress) return failure(result, operation);
  const auto ready = [&] {
    const NcclResult asked = api_->comm_async_error(comm_, &result);
    if (!is_success(asked)) result = asked;
    return result != NcclResult::kInProgress;
  };
  const auto failed = [&] { return lost_member(operation); };
  const Deadline deadline = Deadline::after(patience);
  Status status;
  do {
    status = membership_.fabric.waiter->wait(ready, failed,
                                             deadline.earlier(Deadline::after(kPollInterval)));
  } while (status.code() == StatusCode::kTimeout && !deadline.passed());
  if (status.code() == StatusCode::kTimeout) {
    return Status(StatusCode::kTimeout, "NCCL made no progress in " + std::string(operation) +
                                            " within collective_timeout; run with NCCL_DEBUG=INFO "
                                            "to see which connection it waits for");
  }
  if (!status.ok()) return status;
  return is_success(result) ? Status() : failure(result, operation);
}

Status NcclBackend::failure(NcclResult result, const std::string& operation) {
  // Such an error is most often the end of a peer. Then the lost rank is the cause to name.
  if (result == NcclResult::kRemoteError || result == NcclResult::kSystemError) {
    Status lost;
    const auto found = [&] { return !(lost = lost_member(operation)).ok(); };
    (void)membership_.fabric.waiter->wait(
        found, [] { return Status(); }, Deadline::after(kGoodbyeTime));
    if (!lost.ok()) return lost;
  }
  const char* last = api_->last_error(comm_);
  std::string words = last == nullptr ? "" : last;
  std::replace(words.begin(), words.end(), '\n', ' ');
  return Status(StatusCode::kInternal,
                "NCCL " + nccl_version_text(api_->version) + " failed in " + operation +
                    " on rank " + std::to_string(membership_.fabric.topology.rank) + ", " +
                    device().describe() + ": " + api_->error_string(result) +
                    (words.empty() ? "" : " (" + words + ")") +
                    "; run with NCCL_DEBUG=INFO for what led to it",
                membership_.fabric.topology.rank);
}

Status NcclBackend::lost_member(const std::string& operation) const {
  for (const int rank : membership_.group.ranks) {
    if (rank == membership_.fabric.topology.rank || !membership_.fabric.waiter->lost(rank))
      continue;
    return Status(StatusCode::kRankFailed,
                  "rank " + std::to_string(rank) + " was lost during " + operation, rank);
  }
  return Status();
}

bool NcclBackend::know_memory(CudaPointer address, std::size_t bytes) {
  const auto [at, is_new] = registrations_.try_emplace(address);
  if (is_new) {
    const CudaDevice::Current current(device());
    void* registration = nullptr;
    void* memory = reinterpret_cast<void*>(address);  // NOLINT: NCCL's form of an address
    if (is_success(api_->comm_register(comm_, memory, bytes, &registration))) {
      at->second = registration;
    }
  }
  return at->second.has_value();
}

void NcclBackend::forget_memory(CudaPointer address) {
  const auto at = registrations_.find(address);
  if (at == registrations_.end()) return;
  if (comm_ != nullptr && at->second.value_or(nullptr) != nullptr) {
    const CudaDevice::Current current(device());
    (void)api_->comm_deregister(comm_, *at->second);
  }
  registrations_.erase(at);
}

Status NcclBackend::poll() {
  NcclResult result = NcclResult::kSuccess;
  const NcclResult asked = api_->comm_async_error(comm_, &result);
  if (!is_success(asked)) result = asked;
  return is_accepted(result) ? Status() : failure(result, "a collective that was under way");
}

void NcclBackend::abort() {
  if (comm_ == nullptr) return;
  const CudaDevice::Current current(device());
  (void)api_->comm_abort(std::exchange(comm_, nullptr));
}

void NcclBackend::close(Deadline deadline) {
  if (comm_ == nullptr) return;
  while (!registrations_.empty()) forget_memory(registrations_.begin()->first);
  const CudaDevice::Current current(device());
  NcclResult result = api_->comm_finalize(comm_);
  while (result == NcclResult::kInProgress && !deadline.passed()) {
    if (!is_success(api_->comm_async_error(comm_, &result))) break;
    std::this_thread::sleep_for(kPollInterval);
  }
  if (!is_success(result)) return abort();
  (void)api_->comm_destroy(std::exchange(comm_, nullptr));
}

}  // namespace hvdlite
