// A reliable, ordered, full-duplex stream of bytes between this rank and one peer. The fabric owns
// all channels of a rank.
//
// Two planes use channels: the control plane (negotiation) and the data plane; each has one per
// peer. Implementations: TcpChannel; on one host ShmChannel for control (two rings in shared memory
// plus a Unix socket that closes when the peer dies) and RingChannel for data (two more rings,
// which rely on the control channel for that); in tests InprocChannel (threads as ranks).
//
// Thread: only the engine's runner uses a channel. No call blocks. A writer wakes the reader's
// Waiter; on a TCP channel the data itself does so.
// Errors: kRankFailed once the peer has closed and this rank has read everything that the peer had
// written; kTimeout once the peer's host has been silent for too long (peer_silent). An error
// stays: each later call returns the same one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

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

// The part that the channels over rings share: one end of a pair of rings, and what wakes the peer.
// The caller finds out whether the peer has `gone` before the ring is read, so that this rank sees
// all that the peer wrote before it went.
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

// A data channel between ranks of one host: two rings in their segments. The control channel
// between the same ranks says whether the peer is still there.
//
// Bytes move in pieces of a quarter of a ring, so that the one side writes while the other reads.
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

// A channel between ranks of one host: two rings in shared memory, and an end of the peer's
// lifeline. That is a pair of connected sockets, of which the peer keeps the other end; all ranks
// of the host share this one. It only shows whether the peer is still there: the kernel closes the
// peer's end when the peer dies without a goodbye. So close() ends the channel for this side alone,
// and the fabric closes this rank's own lifeline.
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
