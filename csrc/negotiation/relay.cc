#include "negotiation/relay.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace hvdlite {
namespace {

constexpr std::size_t kLongestLook = 64;  // items, for one that says the same
constexpr std::size_t kLeastItemBytes = 2 + 3 * sizeof(std::uint32_t);

bool meet(const std::vector<int>& a, const std::vector<int>& b) {
  for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
    if (*x == *y) return true;
    if (*x < *y) {
      ++x;
    } else {
      ++y;
    }
  }
  return false;
}

std::size_t head_bytes(const BundleItem& item) { return item.heads.size() / item.from.size(); }

// Both lists of senders are ascending, and no rank is in both.
void unite_senders(BundleItem& item, const BundleItem& more) {
  BundleItem both;
  const auto take = [&both](const BundleItem& source, std::size_t at) {
    const auto length = static_cast<std::ptrdiff_t>(head_bytes(source));
    const auto begin = source.heads.begin() + static_cast<std::ptrdiff_t>(at) * length;
    both.from.push_back(source.from[at]);
    both.heads.insert(both.heads.end(), begin, begin + length);
  };
  std::size_t other = 0;
  for (std::size_t own = 0; own < item.from.size(); ++own) {
    while (other < more.from.size() && more.from[other] < item.from[own]) take(more, other++);
    take(item, own);
  }
  while (other < more.from.size()) take(more, other++);
  item.from = std::move(both.from);
  item.heads = std::move(both.heads);
}

void unite_receivers(BundleItem& item, const BundleItem& more) {
  std::vector<int> both;
  std::merge(item.to.begin(), item.to.end(), more.to.begin(), more.to.end(),
             std::back_inserter(both));
  item.to = std::move(both);
}

void put_runs(Writer& writer, const std::vector<int>& ranks) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> runs;
  for (const int rank : ranks) {
    const auto number = static_cast<std::uint32_t>(rank);
    if (!runs.empty() && runs.back().first + runs.back().second == number) {
      ++runs.back().second;
    } else {
      runs.emplace_back(number, 1);
    }
  }
  writer.put(static_cast<std::uint32_t>(runs.size()));
  for (const auto& [first, length] : runs) {
    writer.put(first);
    writer.put(length);
  }
}

std::vector<int> get_runs(Reader& reader, int size) {
  std::vector<int> ranks;
  const std::uint32_t runs = reader.get_count(2 * sizeof(std::uint32_t));
  for (std::uint32_t i = 0; i < runs && !reader.bad(); ++i) {
    const auto first = reader.get<std::uint32_t>();
    const auto length = reader.get<std::uint32_t>();
    const std::uint64_t end = std::uint64_t{first} + length;
    const bool ascends = ranks.empty() || first > static_cast<std::uint32_t>(ranks.back());
    if (length == 0 || end > static_cast<std::uint64_t>(size) || !ascends) {
      reader.reject();
      break;
    }
    for (std::uint64_t rank = first; rank < end; ++rank) ranks.push_back(static_cast<int>(rank));
  }
  if (ranks.empty()) reader.reject();
  return ranks;
}

bool can_travel(FrameType type) {
  return type == FrameType::kSubmit || type == FrameType::kRespond || type == FrameType::kAbort ||
         type == FrameType::kGoodbye || type == FrameType::kReport || type == FrameType::kEnded;
}

}  // namespace

Bytes BundleItem::message(std::size_t sender) const {
  const auto length = static_cast<std::ptrdiff_t>(head_bytes(*this));
  const auto head = heads.begin() + static_cast<std::ptrdiff_t>(sender) * length;
  Bytes whole(head, head + length);
  whole.insert(whole.end(), body.begin(), body.end());
  return whole;
}

BundleItem make_bundle_item(FrameType type, int from, int to, std::span<const std::byte> body) {
  const std::size_t head =
      type == FrameType::kSubmit ? std::min(kStampBytes, body.size()) : std::size_t{0};
  const std::span<const std::byte> own = body.first(head);
  const std::span<const std::byte> rest = body.subspan(head);
  return {type, {from}, {to}, Bytes(rest.begin(), rest.end()), Bytes(own.begin(), own.end())};
}

void add_to_bundle(std::vector<BundleItem>& items, BundleItem item) {
  std::size_t looks = 0;
  for (auto at = items.rbegin(); at != items.rend() && looks < kLongestLook; ++at, ++looks) {
    if (at->type == item.type && at->body == item.body) {
      if (at->to == item.to && head_bytes(*at) == head_bytes(item) && !meet(at->from, item.from)) {
        return unite_senders(*at, item);
      }
      if (at->from == item.from && at->heads == item.heads && !meet(at->to, item.to)) {
        return unite_receivers(*at, item);
      }
    }
    if (meet(at->from, item.from) && meet(at->to, item.to)) break;
  }
  items.push_back(std::move(item));
}

Bytes encode_bundle(const std::vector<BundleItem>& items) {
  Writer writer = begin_frame(FrameType::kBundle);
  writer.put(static_cast<std::uint32_t>(items.size()));
  for (const BundleItem& item : items) {
    writer.put(item.type);
    put_runs(writer, item.from);
    put_runs(writer, item.to);
    writer.put(static_cast<std::uint8_t>(head_bytes(item)));
    writer.put_all(item.heads);
    writer.put(static_cast<std::uint32_t>(item.body.size()));
    writer.put_all(item.body);
  }
  return finish_frame(writer);
}

bool decode_bundle(std::span<const std::byte> body, int size, std::vector<BundleItem>& items) {
  Reader reader(body);
  const std::uint32_t count = reader.get_count(kLeastItemBytes);
  for (std::uint32_t i = 0; i < count && !reader.bad(); ++i) {
    BundleItem item;
    item.type = reader.get<FrameType>();
    if (!can_travel(item.type)) reader.reject();
    item.from = get_runs(reader, size);
    item.to = get_runs(reader, size);
    const std::size_t head = reader.get<std::uint8_t>();
    const std::span<const std::byte> heads = reader.get_bytes(head * item.from.size());
    item.heads.assign(heads.begin(), heads.end());
    const std::span<const std::byte> bytes = reader.get_bytes(reader.get_count(1));
    item.body.assign(bytes.begin(), bytes.end());
    items.push_back(std::move(item));
  }
  return !reader.bad() && reader.at_end();
}

Relay::Relay(const Topology& topology, std::chrono::microseconds patience)
    : rank_(topology.rank),
      tree_(topology),
      patience_(patience),
      spoken_(topology.size, true),
      left_(topology.size) {
  for (const int rank : tree_.below()) set_spoken(rank, false);
  set_spoken(rank_, false);
}

void Relay::pass(const BundleItem& item, TimePoint now) {
  std::map<int, BundleItem> parts;  // The key is a link.
  for (const int rank : item.to) {
    BundleItem& part = parts[tree_.hop_to(rank)];
    part.to.push_back(rank);
    if (item.type == FrameType::kRespond) set_spoken(rank, false);
  }
  for (auto& [link, part] : parts) {
    part.type = item.type;
    part.from = item.from;
    part.body = item.body;
    part.heads = item.heads;
    if (link == tree_.parent()) {
      if (!queues_.contains(link)) since_ = now;
      urgent_ = urgent_ || item.type != FrameType::kSubmit;
      for (const int rank : item.from) set_spoken(rank, true);
    }
    add_to_bundle(queues_[link], std::move(part));
  }
}

void Relay::left(int rank) {
  if (left_[rank]) return;
  set_spoken(rank, true);
  left_[rank] = true;
  const std::vector<int>& below = tree_.below();
  if (std::binary_search(below.begin(), below.end(), rank)) ++left_below_;
}

void Relay::set_spoken(int rank, bool spoken) {
  const std::vector<int>& below = tree_.below();
  if (spoken_[rank] == spoken || left_[rank]) return;
  if (rank != rank_ && !std::binary_search(below.begin(), below.end(), rank)) return;
  spoken_[rank] = spoken;
  spoken ? --silent_ : ++silent_;
}

std::vector<int> Relay::ready(TimePoint now, bool all) const {
  std::vector<int> links;
  for (const auto& [link, items] : queues_) {
    const bool held = link == tree_.parent() && holds() && now < since_ + patience_;
    if (all || !held) links.push_back(link);
  }
  return links;
}

Bytes Relay::take(int link) {
  if (link == tree_.parent()) urgent_ = false;
  const Bytes bundle = encode_bundle(queues_[link]);
  queues_.erase(link);
  return bundle;
}

std::optional<Relay::TimePoint> Relay::held_until() const {
  if (!holds() || !queues_.contains(tree_.parent())) return std::nullopt;
  return since_ + patience_;
}

}  // namespace hvdlite
