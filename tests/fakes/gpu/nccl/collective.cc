// The collectives, chunk by chunk: every rank shows its chunk, then each rank takes what it needs.
#include <algorithm>
#include <cstring>
#include <thread>

#include "nccl/communicator.h"

namespace fakegpu {
namespace {

// Compares what the ranks are about to do. False when they differ, or a rank is missing.
bool agree(Communicator& communicator, const Descriptor& what) {
  SharedFile& file = communicator.file();
  file.members[communicator.rank()].current = what;
  if (!communicator.meet(file.on_stream)) return false;
  for (int i = 0; i < communicator.size(); ++i) {
    const Descriptor& other = file.members[i].current;
    if (other == what) continue;
    communicator.fail_all("mismatch, where NCCL would hang or crash: rank " +
                          std::to_string(communicator.rank()) + " has " + describe(what) +
                          ", rank " + std::to_string(i) + " has " + describe(other));
    return false;
  }
  return communicator.meet(file.on_stream);  // before anybody shows its next operation
}

struct Buffers {
  const char* input = nullptr;
  char* output = nullptr;
};

// How many parts of `count` elements the input has, and the output.
int input_parts(Kind kind, int size) { return kind == Kind::kReduceScatter ? size : 1; }
int output_parts(Kind kind, int size) { return kind == Kind::kAllGather ? size : 1; }

Buffers resolve(const Communicator& communicator, const Operation& operation) {
  const Kind kind = operation.what.kind;
  const std::size_t bytes = operation.what.count * element_bytes(operation.what.dtype);
  const bool reads = kind != Kind::kBroadcast || operation.what.root == communicator.rank();
  const bool writes = kind != Kind::kReduce || operation.what.root == communicator.rank();
  const auto alias = [&](const void* address, int parts) {
    return static_cast<char*>(
        fake_resolve(communicator.device, address, bytes * static_cast<std::size_t>(parts)));
  };
  Buffers found;
  if (reads) found.input = alias(operation.input, input_parts(kind, communicator.size()));
  if (writes) found.output = alias(operation.output, output_parts(kind, communicator.size()));
  if ((reads && found.input == nullptr) || (writes && found.output == nullptr)) return {};
  return found;
}

// Takes from the shown chunks: `part` of the inputs, `count` elements from `at` of it.
void take(Communicator& communicator, const Operation& operation, const Buffers& buffers, int part,
          std::uint64_t at, std::size_t count) {
  const Descriptor& what = operation.what;
  const std::size_t unit = element_bytes(what.dtype);
  const auto& chunks = communicator.file().chunks;
  char* here = buffers.output + at * unit;
  const bool mine = part == communicator.rank();
  switch (what.kind) {
    case Kind::kBroadcast:
      std::memcpy(here, chunks[what.root], count * unit);
      return;
    case Kind::kAllGather:
      for (int r = 0; r < communicator.size(); ++r) {
        std::memcpy(here + static_cast<std::uint64_t>(r) * what.count * unit, chunks[r],
                    count * unit);
      }
      return;
    default:
      break;
  }
  if (what.kind == Kind::kReduce && what.root != communicator.rank()) return;
  if (what.kind == Kind::kReduceScatter && !mine) return;
  std::vector<const char*> inputs;
  for (int r = 0; r < communicator.size(); ++r) inputs.push_back(chunks[r]);
  Descriptor summed = what;
  if (what.op == ncclNumOps) summed.op = ncclSum;  // every rank has scaled its own input
  reduce(summed, 0, inputs, here, count);
}

bool run_collective(Communicator& communicator, const Operation& operation) {
  const Descriptor& what = operation.what;
  if (!agree(communicator, what)) return false;
  const Buffers buffers = resolve(communicator, operation);
  if (buffers.input == nullptr && buffers.output == nullptr) {
    communicator.fail_all("rank " + std::to_string(communicator.rank()) +
                          " gives an address that is not its device's to " + describe(what));
    return false;
  }
  const std::size_t unit = element_bytes(what.dtype);
  const std::uint64_t per_chunk = kChunkBytes / unit;
  SharedFile& file = communicator.file();
  for (int part = 0; part < input_parts(what.kind, communicator.size()); ++part) {
    for (std::uint64_t at = 0; at < what.count; at += per_chunk) {
      const std::size_t count = std::min(per_chunk, what.count - at);
      if (buffers.input != nullptr) {
        const std::uint64_t begin = static_cast<std::uint64_t>(part) * what.count + at;
        char* shown = file.chunks[communicator.rank()];
        std::memcpy(shown, buffers.input + begin * unit, count * unit);
        if (what.op == ncclNumOps) reduce(what, operation.scale, {shown}, shown, count);
      }
      if (!communicator.meet(file.on_stream)) return false;
      take(communicator, operation, buffers, part, at, count);
      if (!communicator.meet(file.on_stream)) return false;
    }
  }
  return true;
}

// Injects a fault: the error shows, and the kernel does not end by itself.
bool stuck_by_fault(Communicator& communicator) {
  const int code = fake_take_failure("ncclAsync", communicator.device);
  if (code == 0) return false;
  communicator.set_error(static_cast<ncclResult_t>(code), "injected asynchronous error");
  const auto until = communicator.deadline();
  while (communicator.keep_waiting(until)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

bool is_transfer(const Operation& operation) {
  return operation.what.kind == Kind::kSend || operation.what.kind == Kind::kRecv;
}

}  // namespace

void run_group(Communicator& communicator, const std::vector<Operation>& operations) {
  if (communicator.error() != ncclSuccess || communicator.aborted()) return;
  if (stuck_by_fault(communicator)) return;
  std::vector<Operation> transfers;
  for (const Operation& operation : operations) {
    if (is_transfer(operation)) {
      transfers.push_back(operation);
    } else if (!run_collective(communicator, operation)) {
      return;
    }
  }
  if (!transfers.empty()) run_transfers(communicator, transfers);
}

}  // namespace fakegpu
