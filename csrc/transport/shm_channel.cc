#include "transport/shm_channel.h"

#include <sys/socket.h>

#include <utility>

namespace hvdlite {

ShmChannel::ShmChannel(int peer, ByteRing inbound, ByteRing outbound, Bell peer_bell, Fd liveness)
    : rings_{peer, inbound, outbound, peer_bell}, liveness_(std::move(liveness)) {
  close_in_forked_child(liveness_.get());
}

bool ShmChannel::gone() const {
  return !liveness_.valid() || (waiter_ != nullptr && waiter_->lost(rings_.peer));
}

Status ShmChannel::attach(Waiter& waiter) {
  waiter_ = &waiter;
  return waiter.watch(liveness_.get(), rings_.peer);
}

void ShmChannel::close() {
  if (!liveness_.valid()) return;
  ::shutdown(liveness_.get(), SHUT_RDWR);
  liveness_.reset();
}

}  // namespace hvdlite
