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
    : end_(end),
      link_(std::move(link)),
      rings_{peer, ByteRing(link_->ring(1 - end), link_->capacity),
             ByteRing(link_->ring(end), link_->capacity), peer_wake_up} {}

bool InprocChannel::gone() const { return link_->closed[0].load() || link_->closed[1].load(); }

Status InprocChannel::attach(Waiter& waiter) {
  waiter.watch_flag(std::shared_ptr<const std::atomic<bool>>(link_, &link_->closed[1 - end_]),
                    rings_.peer);
  return Status();
}

void InprocChannel::close() {
  if (!link_->closed[end_].exchange(true)) rings_.peer_wake_up.send();
}

}  // namespace hvdlite
