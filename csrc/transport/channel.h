// A reliable, ordered, full-duplex stream of bytes between this rank and one peer. The fabric owns
// all channels of a rank.
//
// Two planes use channels: the control plane (negotiation) and the data plane; each has one per
// peer. Implementations: TcpChannel; on one host ShmChannel; in tests InprocChannel (threads as
// ranks).
//
// Thread: only the engine's runner uses a channel. No call blocks. A writer wakes the reader's
// Waiter; on a TCP channel the data itself does so.
// Errors: kRankFailed once the peer has closed and this rank has read everything that the peer had
// written; kTimeout once the peer's host has been silent for too long (peer_silent). An error
// stays: each later call returns the same one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "base/fd.h"
#include "base/status.h"
#include "transport/byte_ring.h"
#include "transport/waiter.h"

namespace hvdlite {

// The error of a channel whose peer has closed its end.
inline Status peer_gone(int rank) {
  return Status(StatusCode::kRankFailed,
                "the connection to rank " + std::to_string(rank) + " has closed", rank);
}

// The error of a channel whose peer's host has not answered for `seconds`, or takes no more data;
// `error` is the system's errno. The peer itself may live.
Status peer_silent(int rank, double seconds, int error);

class Channel {
 public:
  virtual ~Channel() = default;
  // Takes as many bytes as fit now and returns their number; 0: full, try again after a wake-up.
  virtual Result<std::size_t> try_write(std::span<const std::byte> bytes) = 0;
  // Fills `bytes` with what has arrived and returns the number of bytes; 0: nothing yet.
  virtual Result<std::size_t> try_read(std::span<std::byte> bytes) = 0;
  // Asks `waiter` (borrowed; it outlives the channel's use) to wake for this channel's events:
  // data, room to write again, and the peer's end. Called once.
  virtual Status attach(Waiter& waiter) = 0;
  // Ends the stream: the peer can still read what was written, then gets an error. Idempotent.
  virtual void close() = 0;
};

// A channel between ranks of one host: two rings in memory that both can see.
//
// The control channel of two ranks also has an end of the peer's *lifeline*: a pair of connected
// sockets, of which the peer keeps the other end; all ranks of the host share this one. It only
// shows whether the peer is still there: the kernel closes the peer's end when the peer dies
// without a goodbye. So close() ends the channel for this side alone, and the fabric closes this
// rank's own lifeline. The data channel between the same ranks has no lifeline: the waiter knows of
// the peer's end by the control channel.
class ShmChannel : public Channel {
 public:
  // The rings' memory and the peer's flag are borrowed from segments that outlive the channel. A
  // call moves no more than `most_at_once` bytes.
  ShmChannel(int peer, ByteRing inbound, ByteRing outbound, WakeUp peer_wake_up, Fd lifeline = Fd(),
             std::size_t most_at_once = SIZE_MAX)
      : peer_(peer),
        peer_wake_up_(peer_wake_up),
        inbound_(inbound),
        outbound_(outbound),
        lifeline_(std::move(lifeline)),
        most_at_once_(most_at_once) {}

  Result<std::size_t> try_write(std::span<const std::byte> bytes) override {
    if (gone()) return peer_gone(peer_);
    Result<std::size_t> written = outbound_.write(first_of(bytes));
    if (written.ok() && written.value() > 0) peer_wake_up_.send();
    return written;
  }
  Result<std::size_t> try_read(std::span<std::byte> bytes) override {
    // Asked before the ring is read, so that this rank sees all that the peer wrote before it went.
    const bool was_gone = gone();
    bool was_full = false;
    Result<std::size_t> got = inbound_.read(first_of(bytes), was_full);
    if (was_full && got.ok() && got.value() > 0) peer_wake_up_.send();
    if (was_gone && got.ok() && got.value() == 0 && !bytes.empty()) return peer_gone(peer_);
    return got;
  }
  Status attach(Waiter& waiter) override {
    waiter_ = &waiter;
    return lifeline_.valid() ? waiter.watch(lifeline_.get(), peer_) : Status();
  }
  void close() override {
    closed_ = true;
    lifeline_.reset();
  }

 protected:
  // Whether this end or the peer's has been closed.
  virtual bool gone() const { return closed_ || (waiter_ != nullptr && waiter_->lost(peer_)); }
  const int peer_;
  const WakeUp peer_wake_up_;

 private:
  template <typename Byte>
  std::span<Byte> first_of(std::span<Byte> bytes) const {
    return bytes.first(std::min(bytes.size(), most_at_once_));
  }

  ByteRing inbound_;
  ByteRing outbound_;
  Fd lifeline_;
  const std::size_t most_at_once_;
  const Waiter* waiter_ = nullptr;
  bool closed_ = false;
};

// A channel over a connected stream socket, to a rank of another host.
//
// The channel takes the other host for lost when the host has been silent for `patience` seconds:
// it has not confirmed what was sent, or, while nothing is on its way, has not answered the probes
// that the kernel sends then. The kernels at both ends do this, so it does not matter whether a
// rank is idle. The kernel of a stopped process answers too, until the data sent to it fills its
// buffers.
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
