#include "host/exchange.h"

#include "host/peer_errors.h"

namespace hvdlite {
namespace {

// Moves what can be moved now; true when nothing is left.
Result<bool> move_bytes(Channel& channel, Transfer& transfer) {
  while (!transfer.outgoing.empty()) {
    const Result<std::size_t> written = channel.try_write(transfer.outgoing);
    if (!written.ok()) return written.status();
    if (written.value() == 0) break;
    transfer.outgoing = transfer.outgoing.subspan(written.value());
  }
  while (!transfer.incoming.empty()) {
    const Result<std::size_t> got = channel.try_read(transfer.incoming);
    if (!got.ok()) return got.status();
    if (got.value() == 0) break;
    transfer.incoming = transfer.incoming.subspan(got.value());
  }
  return transfer.outgoing.empty() && transfer.incoming.empty();
}

std::uint64_t bytes_left(const std::vector<Transfer>& transfers) {
  std::uint64_t bytes = 0;
  for (const Transfer& transfer : transfers) {
    bytes += transfer.outgoing.size() + transfer.incoming.size();
  }
  return bytes;
}

// A connection that the kernel gave up says how long the peer was silent.
Status lost(int rank, const Status& why, const char* operation) {
  return lost_peer(rank, operation, why.code() == StatusCode::kTimeout ? ": " + why.message() : "");
}

}  // namespace

Status exchange(std::span<const std::unique_ptr<Channel>> channels, Waiter& waiter,
                std::vector<Transfer>& transfers, Patience patience, const char* operation) {
  Status broken;
  int waiting_for = -1;
  const auto ready = [&] {
    bool complete = true;
    for (Transfer& transfer : transfers) {
      const Result<bool> moved = move_bytes(*channels[transfer.rank], transfer);
      if (!moved.ok()) {
        broken = lost(transfer.rank, moved.status(), operation);
        return true;
      }
      if (!moved.value()) waiting_for = transfer.rank;
      complete = complete && moved.value();
    }
    return complete;
  };
  // The channel itself says when a peer is gone: its control channel may end while data is still on
  // its way.
  const auto failed = [] { return Status(); };
  Status status;
  std::uint64_t left = 0;
  do {
    left = bytes_left(transfers);
    status = waiter.wait(ready, failed, Deadline::after(patience));
    // A slow link is not a dead peer: only a wait without any progress ends it.
  } while (status.code() == StatusCode::kTimeout && bytes_left(transfers) < left);
  if (status.code() == StatusCode::kTimeout) return silent_peer(waiting_for, operation);
  return status.ok() ? broken : status;
}

}  // namespace hvdlite
