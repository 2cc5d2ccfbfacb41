// A channel over a connected stream socket, to a rank of another host.
//
// That host is taken for lost when it has been silent for `patience` seconds: it does not confirm
// what was sent, or while nothing is on its way, does not answer the probes that the kernel sends
// then; both, whether or not a rank does anything. A process that is stopped answers all the same,
// until what is sent to it fills its buffers.
#pragma once

#include "os/fd.h"
#include "transport/channel.h"

namespace hvdlite {

class TcpChannel : public Channel {
 public:
  // `patience` of 0 or of more than the kernel counts (24 days) is for ever.
  TcpChannel(int peer, Fd socket, double patience);
  ~TcpChannel() override { close(); }

  int peer() const override { return peer_; }
  Result<std::size_t> try_write(std::span<const std::byte> bytes) override;
  Result<std::size_t> try_read(std::span<std::byte> bytes) override;
  Status attach(Waiter& waiter) override;
  void close() override;

 private:
  // Of a system call that moved nothing: its error, or 0 at the end of the stream.
  Status gone(int error);
  int peer_;
  Fd socket_;
  double patience_;
  Status gone_;  // the system tells an error once; whoever comes later is told the same
};

}  // namespace hvdlite
