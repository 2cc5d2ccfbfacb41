#include "host/exchange.h"

#include "host/peer_errors.h"
#include "host/silence.h"

namespace hvdlite {
namespace {

// A connection that the kernel gave up says how long the peer was silent.
Status lost(int rank, const Status& why, const char* operation) {
  return lost_peer(rank, operation, why.code() == StatusCode::kTimeout ? ": " + why.message() : "");
}

}  // namespace

void Exchange::begin(Patience patience, const char* operation) {
  for (const int rank : active_) {
    Stream& stream = streams_[static_cast<std::size_t>(rank)];
    stream.outgoing.clear();
    stream.incoming.clear();
    stream.active = false;
  }
  active_.clear();
  patience_ = patience;
  operation_ = operation;
  mark_ = 0;
  broken_ = Status();
}

Exchange::Stream& Exchange::stream_of(int rank) {
  Stream& stream = streams_[static_cast<std::size_t>(rank)];
  if (!stream.active) active_.push_back(rank);
  stream.active = true;
  return stream;
}

void Exchange::send(int rank, std::span<const std::byte> bytes) {
  if (!bytes.empty()) stream_of(rank).outgoing.items.push_back({bytes, mark_ + 1});
}

void Exchange::receive(int rank, std::span<std::byte> bytes) {
  if (!bytes.empty()) stream_of(rank).incoming.items.push_back({bytes, mark_ + 1});
}

Status Exchange::write_some(Channel& channel, Queue<const std::byte>& queue) {
  for (; !queue.empty(); ++queue.first) {
    std::span<const std::byte>& bytes = queue.items[queue.first].bytes;
    while (!bytes.empty()) {
      const Result<std::size_t> written = channel.try_write(bytes);
      if (!written.ok()) return written.status();
      if (written.value() == 0) return Status();
      moved_ += written.value();
      bytes = bytes.subspan(written.value());
    }
  }
  queue.clear();
  return Status();
}

Status Exchange::read_some(Channel& channel, Queue<std::byte>& queue, std::uint64_t mark) {
  for (; !queue.moved(mark); ++queue.first) {
    std::span<std::byte>& bytes = queue.items[queue.first].bytes;
    while (!bytes.empty()) {
      const Result<std::size_t> got = channel.try_read(bytes);
      if (!got.ok()) return got.status();
      if (got.value() == 0) return Status();
      moved_ += got.value();
      bytes = bytes.subspan(got.value());
    }
  }
  if (queue.empty()) queue.clear();
  return Status();
}

bool Exchange::come_to(std::uint64_t mark, bool sent) {
  bool all = true;
  for (const int rank : active_) {
    Stream& stream = streams_[static_cast<std::size_t>(rank)];
    Channel& channel = *fabric_.data[static_cast<std::size_t>(rank)];
    Status status = write_some(channel, stream.outgoing);
    if (status.ok()) status = read_some(channel, stream.incoming, mark);
    if (!status.ok()) {
      broken_ = lost(rank, status, operation_);
      return true;
    }
    if (stream.incoming.moved(mark) && (!sent || stream.outgoing.moved(mark))) continue;
    waiting_for_ = rank;
    owes_ = stream.incoming.moved(mark) ? "takes no data" : "sends no data";
    all = false;
  }
  return all;
}

void Exchange::send_some() {
  for (const int rank : active_) {
    if (!broken_.ok()) return;
    Stream& stream = streams_[static_cast<std::size_t>(rank)];
    const Status status =
        write_some(*fabric_.data[static_cast<std::size_t>(rank)], stream.outgoing);
    if (!status.ok()) broken_ = lost(rank, status, operation_);
  }
}

Status Exchange::await(std::uint64_t mark, bool sent) {
  if (!broken_.ok()) return broken_;
  const auto ready = [&] { return come_to(mark, sent); };
  // The channel itself says when a peer is gone: its control channel may end while data is still on
  // its way.
  const auto failed = [] { return Status(); };
  Silence silence(fabric_, patience_);
  while (true) {
    const std::uint64_t before = moved_;
    const Status status = fabric_.waiter->wait(ready, failed, silence.next());
    if (status.code() != StatusCode::kTimeout) return status.ok() ? broken_ : status;
    // A slow link is not a dead peer: only a wait without any progress ends it.
    if (moved_ > before) {
      silence.moved();
    } else if (silence.gives_up(waiting_for_, operation_, owes_)) {
      return silent_peer(waiting_for_, operation_);
    }
  }
}

}  // namespace hvdlite
