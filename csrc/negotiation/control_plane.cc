#include "negotiation/control_plane.h"

#include <cstring>
#include <utility>

namespace hvdlite {
namespace {

constexpr std::size_t kChunkBytes = 64 << 10;
constexpr std::size_t kLengthBytes = sizeof(std::uint32_t);
constexpr std::size_t kHeaderBytes = kLengthBytes + sizeof(FrameType);

void append(Bytes& to, std::span<const std::byte> bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

void append_frame(Bytes& to, std::byte type, std::span<const std::byte> body) {
  const auto length = static_cast<std::uint32_t>(body.size() + sizeof(FrameType));
  append(to, std::as_bytes(std::span(&length, 1)));
  to.push_back(type);
  append(to, body);
}

void append_in_pieces(Bytes& to, std::span<const std::byte> frame) {
  constexpr std::size_t kLargestBody = kMaxFrameBytes - sizeof(FrameType);
  std::span<const std::byte> body = frame.subspan(kHeaderBytes);
  while (body.size() > kLargestBody) {
    append_frame(to, static_cast<std::byte>(FrameType::kMore), body.first(kLargestBody));
    body = body.subspan(kLargestBody);
  }
  append_frame(to, frame[kLengthBytes], body);
}

}  // namespace

ControlPlane::ControlPlane(Fabric& fabric) : peers_(fabric.topology.size), chunk_(kChunkBytes) {
  for (int rank = 0; rank < fabric.topology.size; ++rank) {
    peers_[rank].channel = fabric.control[rank].get();
  }
}

void ControlPlane::send(int rank, const Bytes& frame) {
  Peer& peer = peers_[rank];
  if (peer.ended || peer.channel == nullptr) return;
  append_in_pieces(peer.outgoing, frame);
  ++frames_sent_;
  write(rank);
}

bool ControlPlane::poll() {
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    Peer& peer = peers_[rank];
    if (peer.channel == nullptr || peer.ended) continue;
    if (!peer.outgoing.empty()) write(rank);
    read(rank);
  }
  return !frames_.empty() || !ended_.empty();
}

void ControlPlane::write(int rank) {
  Peer& peer = peers_[rank];
  const std::span<const std::byte> left = std::span(peer.outgoing).subspan(peer.written);
  const Result<std::size_t> taken = peer.channel->try_write(left);
  // A peer that is gone is noticed by read(), after what it had still said.
  peer.written = taken.ok() ? peer.written + taken.value() : peer.outgoing.size();
  if (peer.written == peer.outgoing.size()) {
    peer.outgoing.clear();
    peer.written = 0;
  }
}

void ControlPlane::read(int rank) {
  Peer& peer = peers_[rank];
  while (!peer.ended) {
    const Result<std::size_t> got = peer.channel->try_read(chunk_);
    if (!got.ok()) return end(rank, got.status());
    if (got.value() == 0) return;
    peer.incoming.insert(peer.incoming.end(), chunk_.begin(),
                         chunk_.begin() + static_cast<std::ptrdiff_t>(got.value()));
    parse(rank);
    if (got.value() < chunk_.size()) return;
  }
}

void ControlPlane::parse(int rank) {
  Peer& peer = peers_[rank];
  std::span<const std::byte> left = peer.incoming;
  while (left.size() >= kLengthBytes) {
    std::uint32_t length = 0;
    std::memcpy(&length, left.data(), sizeof length);
    if (length == 0 || length > kMaxFrameBytes) {
      return end(rank, Status(StatusCode::kInternal,
                              "rank " + std::to_string(rank) + " sent a frame of " +
                                  std::to_string(length) + " bytes",
                              rank));
    }
    if (left.size() - kLengthBytes < length) break;
    take_frame(rank, left.subspan(kLengthBytes, length));
    left = left.subspan(kLengthBytes + length);
  }
  peer.incoming.erase(peer.incoming.begin(), peer.incoming.end() - std::ssize(left));
}

void ControlPlane::take_frame(int rank, std::span<const std::byte> frame) {
  Bytes& pieces = peers_[rank].pieces;
  append(pieces, frame.subspan(sizeof(FrameType)));
  const auto type = static_cast<FrameType>(frame[0]);
  if (type != FrameType::kMore) frames_.push_back({rank, type, std::exchange(pieces, {})});
}

void ControlPlane::end(int rank, Status why) {
  peers_[rank].ended = true;
  ended_.emplace_back(rank, std::move(why));
}

std::vector<Frame> ControlPlane::take_frames() { return std::exchange(frames_, {}); }

std::vector<std::pair<int, Status>> ControlPlane::take_ended() { return std::exchange(ended_, {}); }

std::size_t ControlPlane::unsent() const {
  std::size_t bytes = 0;
  for (const Peer& peer : peers_) bytes += peer.outgoing.size() - peer.written;
  return bytes;
}

std::vector<int> ControlPlane::unread() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (!peers_[rank].outgoing.empty()) ranks.push_back(rank);
  }
  return ranks;
}

bool ControlPlane::flush() {
  bool empty = true;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (peers_[rank].channel == nullptr || peers_[rank].outgoing.empty()) continue;
    write(rank);
    empty = empty && peers_[rank].outgoing.empty();
  }
  return empty;
}

}  // namespace hvdlite
