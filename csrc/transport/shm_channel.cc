#include "transport/shm_channel.h"

#include <utility>

namespace hvdlite {

ShmChannel::ShmChannel(int peer, ByteRing inbound, ByteRing outbound, WakeUp peer_wake_up,
                       Fd lifeline)
    : rings_{peer, inbound, outbound, peer_wake_up}, lifeline_(std::move(lifeline)) {}

bool ShmChannel::gone() const {
  return !lifeline_.valid() || (waiter_ != nullptr && waiter_->lost(rings_.peer));
}

Status ShmChannel::attach(Waiter& waiter) {
  waiter_ = &waiter;
  return waiter.watch(lifeline_.get(), rings_.peer);
}

}  // namespace hvdlite
