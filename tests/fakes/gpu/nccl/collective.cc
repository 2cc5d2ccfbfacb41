// The collectives: every rank shows its input, then each rank takes what it needs. A message waits
// with its destination.
#include <cstring>
#include <thread>

#include "kernels/reduce.h"
#include "nccl/communicator.h"

namespace fakegpu {
namespace {

using hvdlite::DataType;
using hvdlite::ReduceOp;

// By NCCL's numbers.
constexpr DataType kTypes[] = {DataType::kInt8,    DataType::kUint8,   DataType::kInt32,
                               DataType::kUint32,  DataType::kInt64,   DataType::kUint64,
                               DataType::kFloat16, DataType::kFloat32, DataType::kFloat64,
                               DataType::kBfloat16};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin,
                             ReduceOp::kAverage};

struct Buffers {
  const char* input = nullptr;
  char* output = nullptr;
};

bool is_transfer(const Operation& operation) {
  return operation.what.kind == Kind::kSend || operation.what.kind == Kind::kRecv;
}

// How many parts of `count` elements the input has, and the output.
int input_parts(Kind kind, int size) { return kind == Kind::kReduceScatter ? size : 1; }
int output_parts(Kind kind, int size) { return kind == Kind::kAllGather ? size : 1; }

std::size_t bytes_of(const Descriptor& what) { return what.count * size_of(kTypes[what.dtype]); }

// False when the rank gives an address that is not its device's.
bool resolve(Communicator& communicator, const Operation& operation, Buffers& found) {
  const Kind kind = operation.what.kind;
  const bool rooted = operation.what.root == communicator.rank;
  const bool reads = kind != Kind::kRecv && (kind != Kind::kBroadcast || rooted);
  const bool writes = kind != Kind::kSend && (kind != Kind::kReduce || rooted);
  const auto alias = [&](const void* address, int parts) {
    return static_cast<char*>(fake_resolve(
        communicator.device, address, bytes_of(operation.what) * static_cast<std::size_t>(parts)));
  };
  if (reads) found.input = alias(operation.input, input_parts(kind, communicator.size));
  if (writes) found.output = alias(operation.output, output_parts(kind, communicator.size));
  const bool missing = (reads && found.input == nullptr) || (writes && found.output == nullptr);
  if (!missing || operation.what.count == 0) return true;
  communicator.fail_all("rank " + std::to_string(communicator.rank) +
                        " gives an address that is not its device's to " +
                        describe(operation.what));
  return false;
}

// Compares what the ranks are about to do. False when they differ, or a rank is missing.
bool agree(Communicator& communicator, const Descriptor& what) {
  World& world = communicator.world();
  for (int i = 0; i < communicator.size; ++i) {
    const Descriptor& other = world.members[i].current;
    if (other == what) continue;
    communicator.fail_all("mismatch, where NCCL would hang or crash: rank " +
                          std::to_string(communicator.rank) + " has " + describe(what) + ", rank " +
                          std::to_string(i) + " has " + describe(other));
    return false;
  }
  return true;
}

// Takes from what the ranks have shown.
void take(Communicator& communicator, const Operation& operation, char* output) {
  const Descriptor& what = operation.what;
  const std::size_t bytes = bytes_of(what);
  const std::vector<Member>& members = communicator.world().members;
  if (what.kind == Kind::kBroadcast) {
    std::memcpy(output, members[what.root].shown.data(), bytes);
    return;
  }
  if (what.kind == Kind::kAllGather) {
    for (const Member& member : members) {
      std::memcpy(output, member.shown.data(), bytes);
      output += bytes;
    }
    return;
  }
  if (what.kind == Kind::kReduce && what.root != communicator.rank) return;
  const int part = what.kind == Kind::kReduceScatter ? communicator.rank : 0;
  std::vector<const void*> inputs;
  for (const Member& member : members) {
    inputs.push_back(member.shown.data() + static_cast<std::size_t>(part) * bytes);
  }
  // In a pre-multiplied sum every rank has scaled its own input.
  const int op = what.op == ncclNumOps ? static_cast<int>(ncclSum) : what.op;
  hvdlite::reduce(kTypes[what.dtype], kOps[op], inputs, output, what.count,
                  {op == ncclAvg ? communicator.size : 1});
}

bool run_collective(Communicator& communicator, const Operation& operation) {
  const Descriptor& what = operation.what;
  World& world = communicator.world();
  Member& self = world.members[communicator.rank];
  Buffers buffers;
  if (!resolve(communicator, operation, buffers)) return false;
  self.current = what;
  if (buffers.input != nullptr) {
    const auto parts = static_cast<std::size_t>(input_parts(what.kind, communicator.size));
    self.shown.assign(buffers.input, buffers.input + parts * bytes_of(what));
    if (what.op == ncclNumOps) {
      char* shown = self.shown.data();
      hvdlite::scale_copy(kTypes[what.dtype], shown, shown, parts * what.count, operation.scale);
    }
  }
  if (!communicator.meet(world.on_stream) || !agree(communicator, what)) return false;
  take(communicator, operation, buffers.output);
  return communicator.meet(world.on_stream);  // before anybody shows its next input
}

bool send(Communicator& communicator, const Operation& operation) {
  Buffers buffers;
  if (!resolve(communicator, operation, buffers)) return false;
  World& world = communicator.world();
  hvdlite::MutexLock lock(world.mutex);
  world.messages[{communicator.rank, operation.peer}].push_back(
      {operation.what, {buffers.input, buffers.input + bytes_of(operation.what)}});
  world.changed.notify_all();
  return true;
}

bool receive(Communicator& communicator, const Operation& operation) {
  Buffers buffers;
  if (!resolve(communicator, operation, buffers)) return false;
  Message message;
  const bool came = communicator.await([&] {
    auto& waiting = communicator.world().messages[{operation.peer, communicator.rank}];
    if (waiting.empty()) {
      communicator.blame_if_lost(operation.peer);
      return false;
    }
    message = std::move(waiting.front());
    waiting.pop_front();
    return true;
  });
  if (!came) return false;
  if (message.bytes.size() != bytes_of(operation.what)) {
    communicator.fail_all("rank " + std::to_string(operation.peer) + " sends " +
                          describe(message.what) + ", rank " + std::to_string(communicator.rank) +
                          " has " + describe(operation.what));
    return false;
  }
  if (!message.bytes.empty()) {
    std::memcpy(buffers.output, message.bytes.data(), message.bytes.size());
  }
  return true;
}

// Injects a fault: the error shows, and the kernel does not end by itself.
bool stuck_by_fault(Communicator& communicator) {
  const int code = fake_take_failure("ncclAsync", communicator.device);
  if (code == 0) return false;
  communicator.set_error(static_cast<ncclResult_t>(code), "injected asynchronous error");
  (void)communicator.await([] { return false; });
  return true;
}

}  // namespace

void run_group(Communicator& communicator, const std::vector<Operation>& operations) {
  if (communicator.error() != ncclSuccess || communicator.aborted()) return;
  if (stuck_by_fault(communicator)) return;
  for (const Operation& operation : operations) {
    if (!is_transfer(operation) && !run_collective(communicator, operation)) return;
  }
  // A message needs no rank that receives it: so all are sent before the first wait.
  for (const Operation& operation : operations) {
    if (operation.what.kind == Kind::kSend && !send(communicator, operation)) return;
  }
  for (const Operation& operation : operations) {
    if (operation.what.kind == Kind::kRecv && !receive(communicator, operation)) return;
  }
}

}  // namespace fakegpu
