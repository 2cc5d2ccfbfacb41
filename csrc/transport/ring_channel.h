// A data channel between ranks of one host: two rings in their segments. The control channel
// between the same ranks says whether the peer is still there. Threads and errors are those of
// channel.h.
//
// Bytes move in pieces of a quarter of a ring, so that the one side writes while the other reads.
#pragma once

#include <algorithm>
#include <span>

#include "transport/ring_pair.h"

namespace hvdlite {

class RingChannel : public Channel {
 public:
  // The rings' memory and the peer's flag are borrowed from segments that outlive the channel.
  RingChannel(int peer, ByteRing inbound, ByteRing outbound, WakeUp peer_wake_up)
      : rings_{peer, inbound, outbound, peer_wake_up} {}

  Result<std::size_t> try_write(std::span<const std::byte> bytes) override {
    return rings_.write(piece(bytes, rings_.outbound), gone());
  }
  Result<std::size_t> try_read(std::span<std::byte> bytes) override {
    return rings_.read(piece(bytes, rings_.inbound), gone());
  }
  Status attach(Waiter& waiter) override {
    waiter_ = &waiter;
    return Status();
  }
  void close() override { closed_ = true; }

 private:
  template <typename Byte>
  static std::span<Byte> piece(std::span<Byte> bytes, const ByteRing& ring) {
    return bytes.first(std::min(bytes.size(), ring.capacity() / 4));
  }
  bool gone() const { return closed_ || (waiter_ != nullptr && waiter_->lost(rings_.peer)); }

  RingPair rings_;
  const Waiter* waiter_ = nullptr;
  bool closed_ = false;
};

}  // namespace hvdlite
