#include "host/exchange.h"

#include <map>

#include "host/peer_errors.h"

namespace hvdlite {
namespace {

// Moves what can be moved now, towards the end of each span.
Status write_some(Channel& channel, std::span<const std::byte>& outgoing) {
  while (!outgoing.empty()) {
    const Result<std::size_t> written = channel.try_write(outgoing);
    if (!written.ok()) return written.status();
    if (written.value() == 0) break;
    outgoing = outgoing.subspan(written.value());
  }
  return Status();
}

Status read_some(Channel& channel, std::span<std::byte>& incoming) {
  while (!incoming.empty()) {
    const Result<std::size_t> got = channel.try_read(incoming);
    if (!got.ok()) return got.status();
    if (got.value() == 0) break;
    incoming = incoming.subspan(got.value());
  }
  return Status();
}

// The transfers with one rank, in order. What comes first in a direction holds up what follows.
class Stream {
 public:
  explicit Stream(Channel& channel) : channel_(channel) {}

  void add(Transfer& transfer) { transfers_.push_back(&transfer); }
  Status move() {
    for (; sent_ < transfers_.size(); ++sent_) {
      HVDLITE_RETURN_IF_ERROR(write_some(channel_, transfers_[sent_]->outgoing));
      if (!transfers_[sent_]->outgoing.empty()) break;
    }
    for (; received_ < transfers_.size(); ++received_) {
      HVDLITE_RETURN_IF_ERROR(read_some(channel_, transfers_[received_]->incoming));
      if (!transfers_[received_]->incoming.empty()) break;
    }
    return Status();
  }
  bool complete() const { return sent_ == transfers_.size() && received_ == transfers_.size(); }

 private:
  Channel& channel_;
  std::vector<Transfer*> transfers_;
  std::size_t sent_ = 0;  // of the transfers: all that they send has left
  std::size_t received_ = 0;
};

std::map<int, Stream> streams_of(std::span<const std::unique_ptr<Channel>> channels,
                                 std::vector<Transfer>& transfers) {
  std::map<int, Stream> streams;  // by rank
  for (Transfer& transfer : transfers) {
    const auto at = streams.try_emplace(transfer.rank, *channels[transfer.rank]).first;
    at->second.add(transfer);
  }
  return streams;
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
  std::map<int, Stream> streams = streams_of(channels, transfers);
  Status broken;
  int waiting_for = -1;
  const auto ready = [&] {
    bool complete = true;
    for (auto& [rank, stream] : streams) {
      if (Status moved = stream.move(); !moved.ok()) {
        broken = lost(rank, moved, operation);
        return true;
      }
      if (stream.complete()) continue;
      waiting_for = rank;
      complete = false;
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
