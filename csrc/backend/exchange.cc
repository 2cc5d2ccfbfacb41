#include "backend/exchange.h"

#include <string>

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

}  // namespace

Status exchange(std::span<const std::unique_ptr<Channel>> channels, Waiter& waiter,
                std::vector<Transfer>& transfers, Deadline deadline, const char* operation) {
  Status broken;
  int waiting_for = -1;
  const auto ready = [&] {
    bool complete = true;
    for (Transfer& transfer : transfers) {
      const Result<bool> moved = move_bytes(*channels[transfer.rank], transfer);
      if (!moved.ok()) {
        broken = Status(StatusCode::kRankFailed,
                        "rank " + std::to_string(transfer.rank) + " was lost during " + operation,
                        transfer.rank);
        return true;
      }
      if (!moved.value()) waiting_for = transfer.rank;
      complete = complete && moved.value();
    }
    return complete;
  };
  const auto failed = [&]() -> Status {
    for (const Transfer& transfer : transfers) {
      const bool complete = transfer.outgoing.empty() && transfer.incoming.empty();
      if (complete || !waiter.lost(transfer.rank)) continue;
      return Status(StatusCode::kRankFailed,
                    "rank " + std::to_string(transfer.rank) + " was lost during " + operation,
                    transfer.rank);
    }
    return Status();
  };
  Status status = waiter.wait(ready, failed, deadline);
  if (status.code() == StatusCode::kTimeout) {
    return Status(StatusCode::kTimeout,
                  "rank " + std::to_string(waiting_for) + " made no progress in " + operation +
                      " within collective_timeout, although it had joined",
                  waiting_for);
  }
  return status.ok() ? broken : status;
}

}  // namespace hvdlite
