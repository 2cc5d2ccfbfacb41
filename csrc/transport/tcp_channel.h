// A channel over a connected stream socket, to a rank of another host. Threads and errors are those
// of channel.h.
//
// The channel takes the other host for lost when the host has been silent for `patience` seconds:
// it has not confirmed what was sent, or, while nothing is on its way, has not answered the probes
// that the kernel sends then. The kernels at both ends do this, so it does not matter whether a
// rank is idle. The kernel of a stopped process answers too, until the data sent to it fills its
// buffers.
#pragma once

#include "base/fd.h"
#include "transport/channel.h"

namespace hvdlite {

class TcpChannel : public Channel {
 public:
  // A `patience` of 0, or of more than the kernel can count (24 days), means for ever.
  TcpChannel(int peer, Fd socket, double patience);
  ~TcpChannel() override { close(); }

  Result<std::size_t> try_write(std::span<const std::byte> bytes) override;
  Result<std::size_t> try_read(std::span<std::byte> bytes) override;
  Status attach(Waiter& waiter) override;
  void close() override;

 private:
  // The channel's error after a system call that moved nothing; `error` is 0 at the end of the
  // stream.
  Status gone(int error);
  int peer_;
  Fd socket_;
  double patience_;
  Status gone_;  // kept, because the system reports an error once, and later calls return it too
};

}  // namespace hvdlite
