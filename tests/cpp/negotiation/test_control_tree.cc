// The control tree: its shape, what is passed on along it, and what happens when ranks go.
#include <cmath>
#include <set>

#include "check.h"
#include "cpp/engine/engine_worlds.h"
#include "negotiation/control_plane.h"
#include "testing/inproc_world.h"
#include "testing/negotiation_world.h"
#include "wire/bundle.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

Hosts hosts_of(int hosts, int ranks_each) {
  Hosts host_of;
  for (int rank = 0; rank < hosts * ranks_each; ++rank) host_of.push_back(rank / ranks_each);
  return host_of;
}

// Control planes of a world with a tree, all run by the test's thread.
struct PlaneTree {
  explicit PlaneTree(const Hosts& hosts)
      : fabrics(std::move(make_inproc_world(hosts, Config(), /*control_tree=*/true).value())) {
    for (auto& fabric : fabrics) planes.push_back(std::make_unique<ControlPlane>(*fabric));
    got.resize(planes.size());
    ends.resize(planes.size());
  }
  void run(int turns = 40) {
    for (int turn = 0; turn < turns; ++turn) {
      for (std::size_t rank = 0; rank < planes.size(); ++rank) {
        if (gone.contains(static_cast<int>(rank))) continue;
        planes[rank]->poll();
        for (auto& one : planes[rank]->take_ended()) ends[rank].push_back(std::move(one));
        for (Frame& frame : planes[rank]->take_frames()) got[rank].push_back(std::move(frame));
      }
    }
  }
  void leave(int rank) {
    CHECK(planes[rank]->flush());
    fabrics[rank]->close();
    gone.insert(rank);
  }
  void say_goodbye(int rank) {
    for (int other = 0; other < static_cast<int>(planes.size()); ++other) {
      if (other != rank) planes[rank]->send(other, encode_goodbye(3));
    }
  }
  std::set<int> ended_at(int rank) const {
    std::set<int> ranks;
    for (const auto& [ended, why] : ends[rank]) ranks.insert(ended);
    return ranks;
  }
  std::vector<std::unique_ptr<Fabric>> fabrics;
  std::vector<std::unique_ptr<ControlPlane>> planes;
  std::vector<std::vector<Frame>> got;
  std::vector<std::vector<std::pair<int, Status>>> ends;
  std::set<int> gone;
};

Bytes report_of(std::uint32_t number) {
  Writer writer;
  writer.put(number);
  return encode_report(writer.take());
}

// A submit of this rank: its stamps, then the rest.
BundleItem submit_of(int rank, const Bytes& rest) {
  Bytes body(kStampBytes, static_cast<std::byte>(rank));
  body.insert(body.end(), rest.begin(), rest.end());
  return make_bundle_item(FrameType::kSubmit, rank, 0, body);
}

}  // namespace

TEST(control_tree_reaches_every_rank_in_few_hops) {
  for (const int hosts : {1, 2, 3, 4, 5, 16, 33}) {
    const Hosts host_of = hosts_of(hosts, 3);
    const int size = static_cast<int>(host_of.size());
    std::vector<ControlTree> trees;
    for (int rank = 0; rank < size; ++rank) trees.emplace_back(Topology{rank, size, host_of, true});
    const int most = 2 * static_cast<int>(std::log2(hosts)) + 2;
    for (int from = 0; from < size; ++from) {
      for (int to = 0; to < size; ++to) {
        if (to == from) continue;
        int hops = 0;
        for (int at = from; at != to && hops <= most; at = trees[at].hop_to(to)) ++hops;
        CHECK(hops <= most);
        CHECK_EQ(trees[from].linked(to), trees[to].linked(from));
      }
      int links = 0;
      for (int to = 0; to < size; ++to) links += to != from && trees[from].linked(to) ? 1 : 0;
      CHECK(links <= 2 + 3);
    }
    CHECK_EQ(trees[0].below().size(), static_cast<std::size_t>(size - 1));
  }
}

TEST(bundle_merges_what_is_equal_and_keeps_the_order_of_every_stream) {
  const Bytes a(3, std::byte{1});
  const Bytes b(3, std::byte{2});
  std::vector<BundleItem> items;
  for (const int rank : {4, 5, 6}) {
    for (const Bytes& rest : {a, b}) add_to_bundle(items, submit_of(rank, rest));
  }
  CHECK_EQ(items.size(), std::size_t{2});
  add_to_bundle(items, submit_of(5, a));  // once more: a third message of rank 5
  CHECK_EQ(items.size(), std::size_t{3});
  for (const int rank : {1, 2, 7}) {
    add_to_bundle(items, make_bundle_item(FrameType::kAbort, 4, rank, a));
  }
  CHECK_EQ(items.size(), std::size_t{4});
  const Bytes frame = encode_bundle(items);
  std::vector<BundleItem> read;
  const std::span<const std::byte> body = std::span(frame).subspan(5);
  CHECK(decode_bundle(body, 8, read));
  CHECK_EQ(read.size(), items.size());
  CHECK_EQ(read[0].from, (std::vector<int>{4, 5, 6}));
  CHECK_EQ(read[3].to, (std::vector<int>{1, 2, 7}));
  CHECK(read[1].body == b);
  CHECK(read[1].message(2).size() == kStampBytes + b.size());
  CHECK(read[1].message(2)[0] == std::byte{6} && read[1].message(0)[0] == std::byte{4});
  // A rank that does not exist, and every way to cut it short.
  CHECK(!decode_bundle(body, 7, read));
  for (std::size_t bytes = 0; bytes < body.size(); ++bytes) {
    CHECK(!decode_bundle(body.first(bytes), 8, read));
  }
}

TEST(control_tree_carries_messages_between_all_ranks_in_order) {
  PlaneTree world(hosts_of(5, 2));
  for (std::uint32_t number = 0; number < 3; ++number) {
    for (int from = 0; from < 10; ++from) {
      for (int to = 0; to < 10; ++to) {
        if (to != from) world.planes[from]->send(to, report_of(number));
      }
    }
  }
  world.run();
  for (int to = 0; to < 10; ++to) {
    std::vector<std::uint32_t> next(10);
    for (const Frame& frame : world.got[to]) {
      CHECK(frame.type == FrameType::kReport);
      CHECK_EQ(Reader(frame.body).get<std::uint32_t>(), next[frame.from]++);
    }
    for (int from = 0; from < 10; ++from) CHECK_EQ(next[from], from == to ? 0u : 3u);
    CHECK(world.ends[to].empty());
  }
}

TEST(control_tree_tells_every_rank_that_one_has_ended) {
  for (const int dead : {0, 1, 2, 3, 8, 9}) {
    PlaneTree world(hosts_of(5, 2));
    for (int other = 0; other < 10; ++other) {
      if (other != dead) world.planes[dead]->send(other, report_of(1));
    }
    world.run();
    world.leave(dead);
    world.run();
    for (int rank = 0; rank < 10; ++rank) {
      if (rank == dead) continue;
      CHECK_EQ(world.got[rank].size(), std::size_t{1});
      CHECK(!world.ends[rank].empty());
      // The dead rank is named first, before those that only cannot be reached any more.
      CHECK_EQ(world.ends[rank].at(0).first, dead);
      CHECK_STATUS(world.ends[rank].at(0).second, StatusCode::kRankFailed);
      CHECK(world.planes[rank]->ended(dead));
    }
  }
}

TEST(control_tree_waits_for_those_who_need_a_leader_and_ends_in_order) {
  PlaneTree world(hosts_of(5, 2));
  CHECK(world.planes[0]->awaited() && world.planes[2]->awaited() && world.planes[8]->awaited());
  CHECK(!world.planes[1]->awaited() && !world.planes[9]->awaited());
  for (const int rank : {9, 8, 7, 6, 5, 4, 3, 2, 1}) {
    CHECK(!world.planes[rank]->awaited());
    world.say_goodbye(rank);
    world.leave(rank);
    world.run();
  }
  CHECK(!world.planes[0]->awaited());
  CHECK_EQ(world.got[0].size(), std::size_t{9});
  CHECK_EQ(world.ended_at(0).size(), std::size_t{9});
  for (const auto& [rank, why] : world.ends[0]) CHECK_STATUS(why, StatusCode::kRankFailed);
}

TEST(control_tree_says_who_cannot_be_reached_when_a_leader_has_left) {
  PlaneTree world(hosts_of(5, 2));
  world.say_goodbye(2);
  world.leave(2);
  world.run();
  const auto cut_off_from = [&](int rank) {
    std::set<int> ranks;
    for (const auto& [other, leader] : world.planes[rank]->cut_off()) {
      ranks.insert(other);
      CHECK(world.planes[rank]->ended(other));
      CHECK_EQ(leader, 2);
    }
    CHECK_EQ(world.ended_at(rank), (std::set<int>{2}));
    return ranks;
  };
  CHECK_EQ(cut_off_from(0), (std::set<int>{3, 6, 7, 8, 9}));
  CHECK_EQ(cut_off_from(5), (std::set<int>{3, 6, 7, 8, 9}));
  CHECK_EQ(cut_off_from(9), (std::set<int>{0, 1, 3, 4, 5, 6, 7}));
}

TEST(control_tree_takes_the_same_few_messages_of_any_rank_however_many_hosts) {
  const auto most_messages = [](int hosts, bool tree) {
    auto made = NegotiationWorld::make(hosts_of(hosts, 4), tree);
    CHECK_OK(made.status());
    NegotiationWorld& world = *made.value();
    std::uint64_t most = 0;
    // The first negotiation, and the second one, which the cache answers.
    for (int step = 1; step <= 2; ++step) {
      const int looks = world.negotiate({"a", "b", "c"});
      CHECK(looks > 0);
      if (tree) CHECK(looks <= 2 * static_cast<int>(std::log2(hosts)) + 4);
      for (int rank = 0; rank < world.size(); ++rank) {
        const ControlTraffic& traffic = world.traffic(rank);
        most = std::max(most, (traffic.messages_sent + traffic.messages_received) /
                                  static_cast<std::uint64_t>(step));
      }
    }
    return most;
  };
  // To and from 3 ranks of the own host, 2 children and a parent.
  CHECK_EQ(most_messages(17, true), std::uint64_t{12});
  CHECK_EQ(most_messages(60, true), std::uint64_t{12});
  CHECK_EQ(most_messages(17, false), std::uint64_t{2 * 67});
}
