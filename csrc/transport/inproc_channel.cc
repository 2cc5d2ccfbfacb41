#include "transport/inproc_channel.h"

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

InprocChannel::InprocChannel(int peer, int end, std::shared_ptr<InprocLink> link, Bell peer_bell)
    : peer_(peer),
      end_(end),
      link_(std::move(link)),
      inbound_(link_->ring(1 - end), link_->capacity),
      outbound_(link_->ring(end), link_->capacity),
      peer_bell_(peer_bell) {}

bool InprocChannel::gone() const { return link_->closed[0].load() || link_->closed[1].load(); }

Result<std::size_t> InprocChannel::try_write(std::span<const std::byte> bytes) {
  if (gone()) return peer_gone(peer_);
  Result<std::size_t> written = outbound_.write(bytes);
  if (written.ok() && written.value() > 0) peer_bell_.ring();
  return written;
}

Result<std::size_t> InprocChannel::try_read(std::span<std::byte> bytes) {
  const bool ended = gone();
  bool was_full = false;
  Result<std::size_t> got = inbound_.read(bytes, was_full);
  if (was_full && got.ok() && got.value() > 0) peer_bell_.ring();
  if (ended && got.ok() && got.value() == 0 && !bytes.empty()) return peer_gone(peer_);
  return got;
}

Status InprocChannel::attach(Waiter& waiter) {
  waiter.watch_flag(std::shared_ptr<const std::atomic<bool>>(link_, &link_->closed[1 - end_]),
                    peer_);
  return Status();
}

void InprocChannel::close() {
  if (!link_->closed[end_].exchange(true)) peer_bell_.ring();
}

}  // namespace hvdlite
