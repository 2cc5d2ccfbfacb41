// A channel between ranks of one host: two rings in shared memory, and the Unix socket that
// bootstrap made between the two, which now only says whether the peer is still there.
#pragma once

#include "os/fd.h"
#include "transport/byte_ring.h"
#include "transport/channel.h"
#include "transport/waiter.h"

namespace hvdlite {

class ShmChannel : public Channel {
 public:
  // The rings' memory and the bell's flag are borrowed from segments that outlive the channel.
  ShmChannel(int peer, ByteRing inbound, ByteRing outbound, Bell peer_bell, Fd liveness);
  ~ShmChannel() override { close(); }

  int peer() const override { return peer_; }
  Result<std::size_t> try_write(std::span<const std::byte> bytes) override;
  Result<std::size_t> try_read(std::span<std::byte> bytes) override;
  Status attach(Waiter& waiter) override;
  void close() override;

 private:
  bool gone() const;
  int peer_;
  ByteRing inbound_;
  ByteRing outbound_;
  Bell peer_bell_;
  Fd liveness_;
  const Waiter* waiter_ = nullptr;
};

}  // namespace hvdlite
