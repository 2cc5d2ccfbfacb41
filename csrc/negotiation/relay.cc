#include "negotiation/relay.h"

#include <algorithm>
#include <utility>

namespace hvdlite {

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
