// The part that the channels over rings (shm_channel, ring_channel, inproc_channel) share: one end
// of a pair of rings, and what wakes the peer. Threads and errors are those of channel.h. The
// caller finds out whether the peer has `gone` before the ring is read, so that this rank sees all
// that the peer wrote before it went.
#pragma once

#include "transport/byte_ring.h"
#include "transport/channel.h"
#include "transport/waiter.h"

namespace hvdlite {

struct RingPair {
  int peer;
  ByteRing inbound;
  ByteRing outbound;
  WakeUp peer_wake_up;

  Result<std::size_t> write(std::span<const std::byte> bytes, bool gone) {
    if (gone) return peer_gone(peer);
    Result<std::size_t> written = outbound.write(bytes);
    if (written.ok() && written.value() > 0) peer_wake_up.send();
    return written;
  }
  Result<std::size_t> read(std::span<std::byte> bytes, bool gone) {
    bool was_full = false;
    Result<std::size_t> got = inbound.read(bytes, was_full);
    if (was_full && got.ok() && got.value() > 0) peer_wake_up.send();
    if (gone && got.ok() && got.value() == 0 && !bytes.empty()) return peer_gone(peer);
    return got;
  }
};

}  // namespace hvdlite
