#include "negotiation/control_plane.h"

#include <algorithm>
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

// The leaders of a small world do not hold what they pass on: rank 0 can well take it one by one.
constexpr int kFewRanks = 64;

std::span<const std::byte> body_of(const Bytes& frame) {
  return std::span(frame).subspan(kHeaderBytes);
}

}  // namespace

ControlPlane::ControlPlane(Fabric& fabric)
    : topology_(fabric.topology),
      link_of_(fabric.topology.size, -1),
      ended_ranks_(fabric.topology.size),
      said_goodbye_(fabric.topology.size),
      chunk_(kChunkBytes) {
  if (topology_.control_tree) {
    const bool few = topology_.size <= kFewRanks;
    relay_ = std::make_unique<Relay>(topology_,
                                     few ? std::chrono::microseconds(0) : fabric.relay_patience);
  }
  for (int rank = 0; rank < topology_.size; ++rank) {
    if (fabric.control[rank] == nullptr) continue;
    link_of_[rank] = static_cast<int>(links_.size());
    Link& link = links_.emplace_back();
    link.rank = rank;
    link.channel = fabric.control[rank].get();
  }
}

void ControlPlane::send(int rank, const Bytes& frame) {
  if (ended_ranks_[rank]) return;
  if (relay_ && !topology_.same_host(rank)) {
    const auto type = static_cast<FrameType>(frame[kLengthBytes]);
    relay_->pass(make_bundle_item(type, topology_.rank, rank, body_of(frame)),
                 std::chrono::steady_clock::now());
  } else if (link_of_[rank] >= 0) {
    push(links_[link_of_[rank]], frame);
  } else {
    return;
  }
  ++frames_sent_;
}

void ControlPlane::push(Link& link, const Bytes& frame) {
  if (link.ended) return;
  append_in_pieces(link.outgoing, frame);
  ++traffic_.messages_sent;
  write(link);
}

void ControlPlane::push_bundles(bool all) {
  if (!relay_ || relay_->empty()) return;
  for (const int rank : relay_->ready(std::chrono::steady_clock::now(), all)) {
    const Bytes bundle = relay_->take(rank);
    push(links_[link_of_[rank]], bundle);
  }
}

bool ControlPlane::poll() {
  for (Link& link : links_) {
    if (link.ended) continue;
    if (!link.outgoing.empty()) write(link);
    read(link);
  }
  push_bundles(/*all=*/false);
  return !frames_.empty() || !ended_.empty();
}

void ControlPlane::write(Link& link) {
  const std::span<const std::byte> left = std::span(link.outgoing).subspan(link.written);
  const Result<std::size_t> taken = link.channel->try_write(left);
  if (taken.ok()) traffic_.bytes_sent += taken.value();
  // A peer that is gone is noticed by read(), after what it had still said.
  link.written = taken.ok() ? link.written + taken.value() : link.outgoing.size();
  if (link.written == link.outgoing.size()) {
    link.outgoing.clear();
    link.written = 0;
  }
}

void ControlPlane::read(Link& link) {
  while (!link.ended) {
    const Result<std::size_t> got = link.channel->try_read(chunk_);
    if (!got.ok()) return end(link, got.status());
    if (got.value() == 0) return;
    traffic_.bytes_received += got.value();
    link.incoming.insert(link.incoming.end(), chunk_.begin(),
                         chunk_.begin() + static_cast<std::ptrdiff_t>(got.value()));
    parse(link);
    if (got.value() < chunk_.size()) return;
  }
}

void ControlPlane::parse(Link& link) {
  std::span<const std::byte> left = link.incoming;
  while (left.size() >= kLengthBytes) {
    std::uint32_t length = 0;
    std::memcpy(&length, left.data(), sizeof length);
    if (length == 0 || length > kMaxFrameBytes) {
      return end(link, Status(StatusCode::kInternal,
                              "rank " + std::to_string(link.rank) + " sent a frame of " +
                                  std::to_string(length) + " bytes",
                              link.rank));
    }
    if (left.size() - kLengthBytes < length) break;
    take_frame(link, left.subspan(kLengthBytes, length));
    left = left.subspan(kLengthBytes + length);
  }
  link.incoming.erase(link.incoming.begin(), link.incoming.end() - std::ssize(left));
}

void ControlPlane::take_frame(Link& link, std::span<const std::byte> frame) {
  append(link.pieces, frame.subspan(sizeof(FrameType)));
  const auto type = static_cast<FrameType>(frame[0]);
  if (type == FrameType::kMore) return;
  ++traffic_.messages_received;
  Bytes body = std::exchange(link.pieces, {});
  if (type != FrameType::kBundle || !relay_) {
    BundleItem item{type, {link.rank}, {topology_.rank}, std::move(body), {}};
    return take_item(item);
  }
  std::vector<BundleItem> items;
  if (!decode_bundle(body, topology_.size, items)) {
    return end(link, Status(StatusCode::kInternal,
                            "rank " + std::to_string(link.rank) +
                                " sent a bundle of messages "
                                "that cannot be read",
                            link.rank));
  }
  for (BundleItem& item : items) take_item(item);
}

void ControlPlane::take_item(BundleItem& item) {
  if (item.type == FrameType::kGoodbye) {
    for (const int rank : item.from) {
      said_goodbye_[rank] = true;
      if (relay_) relay_->left(rank);
    }
  }
  const auto own = std::find(item.to.begin(), item.to.end(), topology_.rank);
  const bool for_this_rank = own != item.to.end();
  if (for_this_rank) item.to.erase(own);
  if (!item.to.empty()) relay_->pass(item, std::chrono::steady_clock::now());
  if (!for_this_rank) return;
  if (item.type == FrameType::kRespond && relay_) relay_->answered();
  for (std::size_t i = 0; i < item.from.size(); ++i) {
    const int rank = item.from[i];
    if (item.type != FrameType::kEnded) {
      frames_.push_back({rank, item.type, item.message(i)});
      continue;
    }
    Status why = peer_gone(rank);
    if (!item.body.empty()) (void)decode_abort(item.body, why);
    note_end(rank, why);
  }
}

void ControlPlane::end(Link& link, const Status& why) {
  link.ended = true;
  link.outgoing.clear();
  link.written = 0;
  if (relay_) pass_on_end(link.rank, why);
  note_end(link.rank, why);
}

void ControlPlane::pass_on_end(int rank, const Status& why) {
  // After garbage, this rank tells all others itself.
  if (!relay_->tree().leads() || why.code() == StatusCode::kInternal) return;
  const std::vector<int> behind = relay_->tree().behind(rank);
  BundleItem item{FrameType::kEnded, {rank}, {}, {}, {}};
  for (int other = 0; other < topology_.size; ++other) {
    const bool sees_it = topology_.host_of[other] == topology_.host_of[rank];
    if (other == topology_.rank || sees_it || ended_ranks_[other]) continue;
    if (!std::binary_search(behind.begin(), behind.end(), other)) item.to.push_back(other);
  }
  if (why.code() == StatusCode::kTimeout) {
    const Bytes frame = encode_abort(why);
    const std::span<const std::byte> body = body_of(frame);
    item.body.assign(body.begin(), body.end());
  }
  if (!item.to.empty()) relay_->pass(item, std::chrono::steady_clock::now());
}

void ControlPlane::note_end(int rank, const Status& why) {
  if (ended_ranks_[rank]) return;
  ended_ranks_[rank] = true;
  ended_.emplace_back(rank, why);
  if (!relay_) return;
  relay_->left(rank);
  for (const int other : relay_->tree().behind(rank)) {
    if (ended_ranks_[other]) continue;
    ended_ranks_[other] = true;
    relay_->left(other);
    if (!said_goodbye_[other]) cut_off_.emplace_back(other, rank);
  }
}

std::vector<Frame> ControlPlane::take_frames() { return std::exchange(frames_, {}); }

std::vector<std::pair<int, Status>> ControlPlane::take_ended() { return std::exchange(ended_, {}); }

std::optional<Relay::TimePoint> ControlPlane::held_until() const {
  return relay_ ? relay_->held_until() : std::nullopt;
}

std::size_t ControlPlane::unsent() const {
  std::size_t bytes = 0;
  for (const Link& link : links_) bytes += link.outgoing.size() - link.written;
  return bytes;
}

std::vector<int> ControlPlane::unread() const {
  std::vector<int> ranks;
  for (const Link& link : links_) {
    if (!link.outgoing.empty()) ranks.push_back(link.rank);
  }
  return ranks;
}

bool ControlPlane::flush() {
  push_bundles(/*all=*/true);
  bool empty = true;
  for (Link& link : links_) {
    if (link.outgoing.empty()) continue;
    write(link);
    empty = empty && link.outgoing.empty();
  }
  return empty;
}

}  // namespace hvdlite
