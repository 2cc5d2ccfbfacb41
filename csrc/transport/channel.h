// A reliable, ordered, full-duplex stream of bytes between this rank and one peer.
//
// Two planes use it: the control plane (negotiation; one channel per peer) and, between hosts, the
// data plane (a second channel per peer). Implementations: shm_channel (two rings in shared memory
// plus a Unix socket that closes when the peer dies), tcp_channel, inproc_channel (threads as
// ranks).
//
// Thread: one user at a time (the engine's runner). Nothing here blocks. A writer wakes the
// reader's Waiter; a TCP channel does so by the data itself.
// Errors: kRankFailed once the peer has closed and everything it had written has been read;
// kTimeout once its host has been silent for too long (peer_silent). They stay: each later call
// gives the same.
#pragma once

#include <cstddef>
#include <span>

#include "base/status.h"

namespace hvdlite {

class Waiter;

// What reading from a channel ends with.
inline Status peer_gone(int rank) {
  return Status(StatusCode::kRankFailed,
                "the connection to rank " + std::to_string(rank) + " has closed", rank);
}

// The peer's host has not answered for `seconds`, or takes nothing any more; `error` is what the
// system said. The peer itself may live.
Status peer_silent(int rank, double seconds, int error);

class Channel {
 public:
  virtual ~Channel() = default;
  // The rank at the other end.
  virtual int peer() const = 0;
  // Takes as many bytes as fit now and says how many: 0 means full, try again after a wake-up.
  virtual Result<std::size_t> try_write(std::span<const std::byte> bytes) = 0;
  // Fills as much of `bytes` as has arrived and says how much: 0 means nothing yet.
  virtual Result<std::size_t> try_read(std::span<std::byte> bytes) = 0;
  // Asks `waiter` (borrowed, outlives the channel's use) to wake for this channel's events: data,
  // room to write again, and the peer's end. Called once.
  virtual Status attach(Waiter& waiter) = 0;
  // Ends the stream: the peer reads what was written, then an error. Idempotent.
  virtual void close() = 0;
};

}  // namespace hvdlite
