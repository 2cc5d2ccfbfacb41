#include "gpu/nccl_backend.h"

#include <algorithm>

namespace hvdlite {
namespace {

constexpr int kBytes = 1;  // ncclUint8

}  // namespace

NcclBackend::NcclBackend(std::unique_ptr<NcclCommunicator> communicator, DeviceWorkspace& workspace,
                         Backend& host, bool fused)
    : workspace_(workspace),
      host_(host),
      communicator_(std::move(communicator)),
      index_(communicator_->index()),
      size_(communicator_->size()),
      fused_(fused) {
  if (!fused_) return;
  // Without a registration NCCL copies through buffers of its own, which is only slower.
  (void)communicator_->know_memory(workspace_.fusion.address(), workspace_.fusion.bytes());
}

NcclBackend::~NcclBackend() { abort(); }

void NcclBackend::close(Deadline deadline) { communicator_->close(deadline); }

Status NcclBackend::allgather(const Allgather& call, Patience patience) {
  const std::span<const std::byte> input = call.input;
  const std::span<const std::size_t> bytes = call.bytes;
  const std::span<std::byte> output = call.output;
  if (output.empty()) return Status();
  const bool even = std::all_of(bytes.begin(), bytes.end(),
                                [&](std::size_t count) { return count == bytes.front(); });
  if (even) {
    return communicator_->enqueue("an allgather", patience, [&] {
      return nccl().allgather(input.data(), output.data(), bytes.front(), kBytes,
                              communicator_->get(), stream());
    });
  }
  return communicator_->enqueue("an allgather", patience, [&] {
    std::size_t offset = 0;
    int root = -1;
    return for_all(bytes, [&](std::size_t count) {
      std::byte* block = output.data() + offset;
      offset += count;
      ++root;
      if (count == 0) return NcclResult::kSuccess;
      const void* source = root == index_ ? static_cast<const void*>(input.data()) : block;
      return nccl().broadcast(source, block, count, kBytes, root, communicator_->get(), stream());
    });
  });
}

Status NcclBackend::broadcast(const Broadcast& call, Patience patience) {
  if (call.output.empty()) return Status();
  return communicator_->enqueue("a broadcast", patience, [&] {
    return nccl().broadcast(call.input.data(), call.output.data(), call.output.size(), kBytes,
                            call.group.index_of(call.root), communicator_->get(), stream());
  });
}

Status NcclBackend::alltoall(const Alltoall& call, Patience patience) {
  return communicator_->enqueue("an alltoall", patience, [&] {
    const std::byte* from = call.input.data();
    std::byte* to = call.output.data();
    int peer = -1;
    return for_all(call.send_bytes, [&](std::size_t sent) {
      const std::size_t received = call.receive_bytes[++peer];
      const std::byte* part = std::exchange(from, from + sent);
      std::byte* place = std::exchange(to, to + received);
      NcclResult result = NcclResult::kSuccess;
      if (sent > 0) {
        result = nccl().send(part, sent, kBytes, peer, communicator_->get(), stream());
      }
      if (received > 0 && (result == NcclResult::kSuccess || result == NcclResult::kInProgress)) {
        result = nccl().recv(place, received, kBytes, peer, communicator_->get(), stream());
      }
      return result;
    });
  });
}

Status NcclBackend::barrier(const Group& group, Patience patience) {
  return host_.barrier(group, patience);
}

}  // namespace hvdlite
