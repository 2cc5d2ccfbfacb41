// A channel over a connected stream socket, to a rank of another host.
#pragma once

#include "os/fd.h"
#include "transport/channel.h"

namespace hvdlite {

class TcpChannel : public Channel {
 public:
  TcpChannel(int peer, Fd socket);
  ~TcpChannel() override { close(); }

  int peer() const override { return peer_; }
  Result<std::size_t> try_write(std::span<const std::byte> bytes) override;
  Result<std::size_t> try_read(std::span<std::byte> bytes) override;
  Status attach(Waiter& waiter) override;
  void close() override;

 private:
  int peer_;
  Fd socket_;
};

}  // namespace hvdlite
