// A reliable, ordered, full-duplex stream of bytes between this rank and one peer. The fabric owns
// all channels of a rank.
//
// Two planes use channels: the control plane (negotiation) and the data plane; each has one per
// peer. Implementations: tcp_channel; on one host shm_channel for control (two rings in shared
// memory plus a Unix socket that closes when the peer dies) and ring_channel for data (two more
// rings, which rely on the control channel for that); inproc_channel (threads as ranks).
//
// Thread: only the engine's runner uses a channel. No call blocks. A writer wakes the reader's
// Waiter; on a TCP channel the data itself does so.
// Errors: kRankFailed once the peer has closed and this rank has read everything that the peer had
// written; kTimeout once the peer's host has been silent for too long (peer_silent). An error
// stays: each later call returns the same one.
#pragma once

#include <cstddef>
#include <span>

#include "base/status.h"

namespace hvdlite {

class Waiter;

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

}  // namespace hvdlite
