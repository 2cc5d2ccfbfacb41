// Messages over control channels: of any length, in order, and what a broken peer may send. Then
// the control tree: its shape, what is passed on along it, and what happens when ranks go.
#include <cmath>
#include <cstring>
#include <random>
#include <set>

#include "check.h"
#include "cpp/engine/engine_worlds.h"
#include "negotiation/control_plane.h"
#include "negotiation/relay.h"
#include "support/inproc_world.h"
#include "support/negotiation_world.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

struct Planes {
  Planes() : fabrics(std::move(make_inproc_world({0, 0}, Config()).value())) {
    for (auto& fabric : fabrics) planes.emplace_back(*fabric);
  }
  // Moves everything; gives what rank 1 got.
  std::vector<Frame> deliver(std::size_t count) {
    std::vector<Frame> got;
    CHECK(soon([&] {
      planes[0].poll();
      planes[1].poll();
      for (Frame& frame : planes[1].take_frames()) got.push_back(std::move(frame));
      return got.size() >= count;
    }));
    return got;
  }
  std::vector<std::unique_ptr<Fabric>> fabrics;
  std::vector<ControlPlane> planes;
};

Bytes message_of(std::size_t bytes, FrameType type) {
  std::mt19937 random(static_cast<unsigned>(bytes));
  Bytes frame(sizeof(std::uint32_t) + 1 + bytes);
  frame[sizeof(std::uint32_t)] = static_cast<std::byte>(type);
  for (std::size_t i = 5; i < frame.size(); ++i) frame[i] = static_cast<std::byte>(random());
  return frame;
}

}  // namespace

TEST(control_plane_carries_messages_of_any_length_in_order) {
  Planes world;
  constexpr std::size_t kLargest = kMaxFrameBytes - 1;
  const std::vector<std::size_t> lengths = {
      0,      10,        kLargest - 1,     kLargest, kLargest + 1, 1,           2 * kLargest, 7,
      70'000, 3'000'000, 2 * kLargest + 1, 0,        20 << 20,     kLargest + 5};
  for (const std::size_t bytes : lengths) {
    world.planes[0].send(
        1, message_of(bytes, bytes % 2 == 0 ? FrameType::kAbort : FrameType::kGoodbye));
  }
  CHECK_EQ(world.planes[0].frames_sent(), lengths.size());
  CHECK_EQ(world.planes[0].unread(), std::vector<int>{1});
  const std::vector<Frame> got = world.deliver(lengths.size());
  CHECK_EQ(got.size(), lengths.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const Bytes sent = message_of(lengths[i], FrameType::kAbort);
    CHECK(got[i].type == (lengths[i] % 2 == 0 ? FrameType::kAbort : FrameType::kGoodbye));
    CHECK_EQ(got[i].from, 0);
    CHECK(std::equal(got[i].body.begin(), got[i].body.end(), sent.begin() + 5, sent.end()));
  }
  CHECK_EQ(world.planes[0].unsent(), std::size_t{0});
  CHECK(world.planes[0].unread().empty());
}

TEST(control_plane_refuses_frames_of_impossible_length) {
  for (const std::uint32_t length : {0u, kMaxFrameBytes + 1, UINT32_MAX}) {
    Planes world;
    Bytes bytes(5, static_cast<std::byte>(FrameType::kGoodbye));
    std::memcpy(bytes.data(), &length, sizeof length);
    CHECK_OK(world.fabrics[0]->control[1]->try_write(bytes).status());
    CHECK(soon([&] { return world.planes[1].poll(); }));
    CHECK(world.planes[1].take_frames().empty());
    const auto ended = world.planes[1].take_ended();
    CHECK_EQ(ended.size(), std::size_t{1});
    CHECK_STATUS(ended.at(0).second, StatusCode::kInternal);
  }
}

// Names of 100 bytes: the request has 5 MB, which are five frames, and so has its answer; that of
// the allgather has the rows of three ranks besides.
TEST(control_plane_takes_operations_of_forty_thousand_tensors) {
  constexpr int kTensors = 40'000;
  for (const Kind kind : {Kind::kBroadcast, Kind::kAllgather}) {
    run_world({0, 0, 1}, [&](int rank, Engine& engine) {
      std::vector<float> values(1, static_cast<float>(rank));
      EntryPtr entry = allreduce_entry("many", values);
      Request& request = entry->request;
      request.kind = kind;
      if (kind == Kind::kBroadcast) request.root = 1;
      request.tensors.assign(kTensors, {std::string(100, 'x'), DataType::kFloat32, {0}});
      entry->inputs.assign(kTensors, values.data());
      entry->outputs.assign(kTensors, kind == Kind::kBroadcast ? values.data() : nullptr);
      CHECK_OK(run(engine, entry));
      const std::size_t members = kind == Kind::kBroadcast ? 0 : 3;
      CHECK_EQ(entry->completion->first_dimensions.size(), members * kTensors);
      CHECK_OK(run(engine, allreduce_entry("after", values)));
      CHECK_EQ(values[0], 3.0f);
    });
  }
}

// Rank 0 is played by the test: it answers with too few and too many rows.
TEST(control_plane_ends_the_world_where_an_answer_does_not_fit_the_question) {
  for (const Kind kind : {Kind::kAllgather, Kind::kAlltoall, Kind::kJoin, Kind::kAllreduce}) {
    for (const std::size_t numbers : {0, 1, 2, 3, 4}) {
      auto fabrics = std::move(make_inproc_world({0, 0}, quick_config()).value());
      ControlPlane coordinator(*fabrics[0]);
      auto backend = std::make_unique<HostBackend>(*fabrics[1], quick_config());
      Engine engine(std::move(fabrics[1]), std::move(backend), quick_config());
      std::vector<float> values(4);
      const EntryPtr entry = rows_entry(kind, "x", values);
      if (kind == Kind::kJoin) entry->request.tensors.clear();
      CHECK_OK(engine.enqueue(entry, false));
      CHECK(soon([&] { return coordinator.poll(); }));
      Submit asked;
      CHECK(decode_submit(coordinator.take_frames().at(0).body, asked));
      const std::size_t due = kind == Kind::kAllreduce ? 0 : kind == Kind::kJoin ? 1 : 2;
      const bool absent = numbers == 4;  // the numbers fit, but this rank has not joined
      if (numbers == due) continue;
      Response answer;
      answer.form = Response::Form::kFull;
      answer.request = asked.requests.at(0);
      answer.first_dimensions.assign(absent ? due : numbers, 4);
      if (absent) answer.absent = {1};
      answer.generation = absent ? 1 : 0;
      coordinator.send(1, encode_respond({answer}));
      const Status status = finish(engine, entry);
      CHECK_STATUS(status, StatusCode::kInternal);
      CHECK(status.message().find("does not fit what this rank has submitted") !=
            std::string::npos);
    }
  }
}

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
