#include "support/inproc_channel.h"

namespace hvdlite {
namespace {

constexpr std::size_t kAlignment = 64;

std::size_t stride(std::size_t capacity) {
  return (ByteRing::footprint(capacity) + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

InprocLink::InprocLink(std::size_t capacity)
    : memory(2 * stride(capacity) + kAlignment), capacity(capacity) {}

std::byte* InprocLink::ring(int direction) {
  const auto start = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::uintptr_t aligned = (start + kAlignment - 1) / kAlignment * kAlignment;
  return memory.data() + (aligned - start) + static_cast<std::size_t>(direction) * stride(capacity);
}

InprocChannel::InprocChannel(int peer, int end, std::shared_ptr<InprocLink> link,
                             WakeUp peer_wake_up)
    : ShmChannel(peer, ByteRing(link->ring(1 - end), link->capacity),
                 ByteRing(link->ring(end), link->capacity), peer_wake_up),
      end_(end),
      link_(std::move(link)) {}

Status InprocChannel::attach(Waiter& waiter) {
  waiter.watch_flag(std::shared_ptr<const std::atomic<bool>>(link_, &link_->closed[1 - end_]),
                    peer_);
  return Status();
}

void InprocChannel::close() {
  if (!link_->closed[end_].exchange(true)) peer_wake_up_.send();
}

}  // namespace hvdlite
