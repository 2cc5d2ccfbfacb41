#include "transport/shm_channel.h"

#include <sys/socket.h>

#include <utility>

namespace hvdlite {

ShmChannel::ShmChannel(int peer, ByteRing inbound, ByteRing outbound, Bell peer_bell, Fd liveness)
    : peer_(peer),
      inbound_(inbound),
      outbound_(outbound),
      peer_bell_(peer_bell),
      liveness_(std::move(liveness)) {
  close_in_forked_child(liveness_.get());
}

bool ShmChannel::gone() const {
  return !liveness_.valid() || (waiter_ != nullptr && waiter_->lost(peer_));
}

Result<std::size_t> ShmChannel::try_write(std::span<const std::byte> bytes) {
  if (gone()) return peer_gone(peer_);
  Result<std::size_t> written = outbound_.write(bytes);
  if (written.ok() && written.value() > 0) peer_bell_.ring();
  return written;
}

Result<std::size_t> ShmChannel::try_read(std::span<std::byte> bytes) {
  // Asked before the ring is read: what a peer wrote before it went is then seen.
  const bool ended = gone();
  bool was_full = false;
  Result<std::size_t> got = inbound_.read(bytes, was_full);
  if (was_full && got.ok() && got.value() > 0) peer_bell_.ring();
  if (ended && got.ok() && got.value() == 0 && !bytes.empty()) return peer_gone(peer_);
  return got;
}

Status ShmChannel::attach(Waiter& waiter) {
  waiter_ = &waiter;
  return waiter.watch(liveness_.get(), peer_);
}

void ShmChannel::close() {
  if (!liveness_.valid()) return;
  ::shutdown(liveness_.get(), SHUT_RDWR);
  liveness_.reset();
}

}  // namespace hvdlite
