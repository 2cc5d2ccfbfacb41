// Messages over control channels: of any length, in order, and what a broken peer may send.
#include <cstring>
#include <random>

#include "check.h"
#include "cpp/engine/engine_worlds.h"
#include "negotiation/control_plane.h"
#include "testing/inproc_world.h"

using namespace hvdlite;
using namespace hvdlite::testing;

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
