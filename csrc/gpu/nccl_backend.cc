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
      fused_(fused),
      adasum_(workspace, fused ? workspace.fusion.bytes() : 0) {
  if (!fused_) return;
  // Without a registration NCCL copies through buffers of its own, which is only slower.
  (void)communicator_->know_memory(workspace_.fusion.address(), workspace_.fusion.bytes());
}

NcclBackend::~NcclBackend() { abort(); }

void NcclBackend::close(Deadline deadline) { communicator_->close(deadline); }

Status NcclBackend::prepare_adasum(const Group& group, DataType dtype,
                                   std::span<const std::uint64_t> counts, Patience patience) {
  return adasum_.prepare(host_, group, index_, dtype, counts, patience);
}

Status NcclBackend::allgather(const Group&, std::span<const std::byte> input,
                              std::span<const std::size_t> bytes, std::span<std::byte> output,
                              Patience patience) {
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

Status NcclBackend::broadcast(const Group& group, int root, std::span<const std::byte> input,
                              std::span<std::byte> output, Patience patience) {
  if (output.empty()) return Status();
  return communicator_->enqueue("a broadcast", patience, [&] {
    return nccl().broadcast(input.data(), output.data(), output.size(), kBytes,
                            group.index_of(root), communicator_->get(), stream());
  });
}

Status NcclBackend::alltoall(const Group&, std::span<const std::byte> input,
                             std::span<const std::size_t> send_bytes, std::span<std::byte> output,
                             std::span<const std::size_t> receive_bytes, Patience patience) {
  return communicator_->enqueue("an alltoall", patience, [&] {
    const std::byte* from = input.data();
    std::byte* to = output.data();
    int peer = -1;
    return for_all(send_bytes, [&](std::size_t sent) {
      const std::size_t received = receive_bytes[++peer];
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
