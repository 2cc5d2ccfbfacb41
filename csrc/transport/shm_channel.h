// A channel between ranks of one host: two rings in shared memory, and an end of the peer's
// lifeline. That is a pair of connected sockets, of which the peer keeps the other end; all ranks
// of the host share this one. It only shows whether the peer is still there: the kernel closes the
// peer's end when the peer dies without a goodbye. So close() ends the channel for this side alone,
// and the fabric closes this rank's own lifeline. Threads and errors are those of channel.h.
#pragma once

#include "base/fd.h"
#include "transport/ring_pair.h"

namespace hvdlite {

class ShmChannel : public Channel {
 public:
  // The rings' memory and the peer's flag are borrowed from segments that outlive the channel.
  ShmChannel(int peer, ByteRing inbound, ByteRing outbound, WakeUp peer_wake_up, Fd lifeline);
  ~ShmChannel() override { close(); }

  Result<std::size_t> try_write(std::span<const std::byte> bytes) override {
    return rings_.write(bytes, gone());
  }
  Result<std::size_t> try_read(std::span<std::byte> bytes) override {
    return rings_.read(bytes, gone());
  }
  Status attach(Waiter& waiter) override;
  void close() override { lifeline_.reset(); }

 private:
  bool gone() const;
  RingPair rings_;
  Fd lifeline_;
  const Waiter* waiter_ = nullptr;
};

}  // namespace hvdlite
