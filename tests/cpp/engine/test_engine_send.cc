// Whole engines whose ranks send to each other, on one host and on several.
#include <atomic>

#include "check.h"
#include "engine_worlds.h"
#include "host/host_backend.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

using Buffer = std::vector<std::byte>;

const std::vector<Hosts> kSendWorlds = {{0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 0, 0, 0}, {0, 1, 2, 3}};

// What both ranks submit; `data` is read by the source and written by the destination.
EntryPtr send_entry(const std::string& name, int source, int destination, void* data,
                    std::int64_t count, DataType dtype = DataType::kFloat32) {
  auto entry = std::make_shared<Entry>();
  entry->request.kind = Kind::kSend;
  entry->request.name = name;
  entry->request.ranks = {source, destination};
  entry->request.tensors = {{name, dtype, {count}}};
  entry->inputs = {data};
  entry->outputs = {data};
  return entry;
}

EntryPtr send_entry(const std::string& name, int source, int destination,
                    std::vector<float>& values) {
  return send_entry(name, source, destination, values.data(),
                    static_cast<std::int64_t>(values.size()));
}

std::byte byte_of(std::size_t i, int seed) {
  return static_cast<std::byte>((i * 2654435761U >> 7) + static_cast<std::size_t>(seed));
}

Buffer filled(std::size_t count, int seed) {
  Buffer bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = byte_of(i, seed);
  return bytes;
}

// Rank `source` sends to rank `destination`; the others do nothing.
Status pass_bytes(int rank, Engine& engine, const std::string& name, int source, int destination,
                  Buffer& data) {
  if (rank != source && rank != destination) return Status();
  return run(engine, send_entry(name, source, destination, data.data(),
                                static_cast<std::int64_t>(data.size()), DataType::kUint8));
}

void check_refusal(const Status& status, StatusCode code, int rank, const std::string& text) {
  CHECK_STATUS(status, code);
  CHECK_EQ(status.failed_rank(), rank);
  CHECK_EQ(status.message().substr(0, text.size()), text);
}

// The mean of ones.
void check_mean_of_ones(Engine& engine) {
  std::vector<float> values(3, 1.0F);
  CHECK_OK(run(engine, allreduce_entry("mean", values, ReduceOp::kAverage)));
  CHECK_EQ(values, std::vector<float>(3, 1.0F));
}

}  // namespace

TEST(engine_moves_many_sends_at_once_in_any_order_of_submission) {
  constexpr int kEach = 20;
  for (const Hosts& hosts : kSendWorlds) {
    run_world(hosts, [](int rank, Engine& engine) {
      std::vector<std::vector<float>> data;
      data.reserve(static_cast<std::size_t>(2 * kEach * engine.size()));
      std::vector<std::pair<EntryPtr, float>> entries;
      for (int i = 0; i < kEach; ++i) {
        const int step = rank % 2 == 0 ? i : kEach - 1 - i;
        for (int peer = 0; peer < engine.size(); ++peer) {
          if (peer == rank) continue;
          const auto value = [&](int from, int to) {
            return static_cast<float>(100 * step + 10 * from + to);
          };
          const std::size_t count = step % 5 == 4 ? 200000 : 10;
          data.emplace_back(count, value(rank, peer));
          entries.emplace_back(send_entry(std::to_string(step), rank, peer, data.back()),
                               value(rank, peer));
          data.emplace_back(count, -1.0F);
          entries.emplace_back(send_entry(std::to_string(step), peer, rank, data.back()),
                               value(peer, rank));
        }
      }
      for (const auto& [entry, value] : entries) CHECK_OK(engine.enqueue(entry, false));
      check_mean_of_ones(engine);  // an allreduce among them
      for (const auto& [entry, value] : entries) {
        CHECK_OK(finish(engine, entry));
        const auto* values = static_cast<const float*>(entry->outputs[0]);
        CHECK_EQ(values[0], value);
        CHECK_EQ(values[entry->request.tensors[0].count() - 1], value);
      }
    });
  }
}

TEST(engine_remembers_a_send_and_asks_nobody_else) {
  run_world({0, 0, 1}, [](int rank, Engine& engine) {
    for (int step = 0; step < 5; ++step) {
      Buffer data(100);
      CHECK_OK(pass_bytes(rank, engine, "x", 1, 2, data));
    }
    CHECK_EQ(engine.counters().cache_hits.get(), std::uint64_t{rank == 0 ? 0U : 4U});
    CHECK_EQ(engine.counters().batches.get(), std::uint64_t{rank == 0 ? 0U : 5U});
    check_mean_of_ones(engine);
  });
}

TEST(engine_keeps_sends_and_collectives_of_one_name_apart) {
  run_world({0, 0, 0}, [](int rank, Engine& engine) {
    for (int step = 0; step < 4; ++step) {
      std::vector<float> sum(3, 1.0F);
      CHECK_OK(run(engine, allreduce_entry("x", sum)));
      CHECK_EQ(sum, std::vector<float>(3, 3.0F));
      Buffer data = filled(9, rank);
      CHECK_OK(pass_bytes(rank, engine, "x", step % 2, 2, data));
      if (rank == 2) CHECK(data == filled(9, step % 2));
      std::vector<float> shared(3, static_cast<float>(rank));
      EntryPtr entry = allreduce_entry("y", shared);
      entry->request.kind = Kind::kBroadcast;
      entry->request.root = 1;
      CHECK_OK(run(engine, entry));
      CHECK_EQ(shared, std::vector<float>(3, 1.0F));
    }
  });
}

TEST(engine_sends_in_a_process_set) {
  run_world({0, 0, 1, 1}, [](int rank, Engine& engine) {
    const std::uint32_t set = add_set(engine, {1, 2, 3});
    std::vector<float> data(4, static_cast<float>(rank));
    if (rank == 1 || rank == 3) {
      EntryPtr entry = send_entry("x", 3, 1, data);
      entry->request.process_set = set;
      CHECK_OK(run(engine, entry));
      CHECK_EQ(data, std::vector<float>(4, 3.0F));
    }
    check_mean_of_ones(engine);
    CHECK_OK(run(engine, removal(set)));
  });
}

TEST(engine_names_both_ranks_of_a_send_that_does_not_fit) {
  run_world({0, 0, 1}, [](int rank, Engine& engine) {
    const auto both = [&](std::int64_t count, DataType dtype) {
      Buffer data(80);
      if (rank == 0) return run(engine, send_entry("x", 0, 2, data.data(), 5));
      return run(engine, send_entry("x", 0, 2, data.data(), count, dtype));
    };
    if (rank != 1) {
      Status status = both(6, DataType::kFloat32);
      CHECK_STATUS(status, StatusCode::kMismatch);
      CHECK(has(status.message(), "send 'x': ranks disagree about the number of elements: "));
      CHECK(has(status.message(), "rank 0 has 5"));
      CHECK(has(status.message(), "rank 2 has 6"));
      status = both(5, DataType::kInt32);
      CHECK_STATUS(status, StatusCode::kMismatch);
      CHECK(has(status.message(), "rank 0 has float32"));
      CHECK(has(status.message(), "rank 2 has int32"));
      CHECK_OK(both(5, DataType::kFloat32));
    }
    check_mean_of_ones(engine);
  });
}

TEST(engine_refuses_sends_to_itself_to_strangers_and_from_gpus) {
  run_world({0, 0, 0}, [](int rank, Engine& engine) {
    std::vector<float> data(3);
    const std::uint32_t set = add_set(engine, {0, 1});
    const auto refused = [&](EntryPtr entry, std::uint32_t of, const std::string& text) {
      entry->request.process_set = of;
      const Status status = engine.enqueue(entry, false);
      CHECK_STATUS(status, StatusCode::kInvalidArgument);
      CHECK(has(status.message(), text));
    };
    refused(send_entry("x", rank, rank, data), 0, "a rank does not send to itself");
    refused(send_entry("x", rank, 3, data), 0, "rank 3 is not a member of");
    refused(send_entry("x", -1, rank, data), 0, "rank -1 is not a member of");
    const EntryPtr on_gpu = send_entry("x", rank, (rank + 1) % 3, data);
    on_gpu->request.tensors[0].device = DeviceType::kGpu;
    refused(on_gpu, 0, "a send takes a tensor in host memory, and this one is on a GPU; copy it");
    if (rank < 2) {
      refused(send_entry("x", rank, 2, data), set, "rank 2 is not a member of process set [0, 1]");
    }
    check_mean_of_ones(engine);
  });
  Engine alone(nullptr, std::make_unique<SelfBackend>(), Config());
  std::vector<float> data(3);
  CHECK_STATUS(alone.enqueue(send_entry("x", 0, 1, data), false), StatusCode::kInvalidArgument);
  CHECK_STATUS(alone.enqueue(send_entry("x", 0, 0, data), false), StatusCode::kInvalidArgument);
}

TEST(engine_sends_are_errors_where_the_other_rank_has_joined) {
  for (const bool joins_first : {true, false}) {
    run_world({0, 0, 1}, [&](int rank, Engine& engine) {
      const EntryPtr join = join_entry();
      std::vector<float> data(3);
      if (rank == 2) {
        // A send between the others needs nothing of the rank that has joined.
        if (!joins_first) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        CHECK_OK(run(engine, join));
      } else {
        if (joins_first) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        if (rank == 1) {
          check_refusal(run(engine, send_entry("x", 1, 2, data)), StatusCode::kInvalidArgument, 2,
                        "send 'x' from rank 1 to rank 2: rank 2, which has joined, neither sends");
        }
        CHECK_OK(run(engine, send_entry("y", 0, 1, data)));
        check_mean_of_ones(engine);
        CHECK_OK(run(engine, send_entry("y", 0, 1, data)));
        CHECK_OK(run(engine, join));
      }
      if (rank != 1) CHECK_OK(run(engine, send_entry("z", 2, 0, data)));
      check_mean_of_ones(engine);
    });
  }
}

TEST(engine_sends_name_a_rank_that_left_or_died) {
  for (const bool dies : {false, true}) {
    auto engines = make_engines({0, 0, 1}, quick_config());
    std::atomic<bool> told{false};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        Engine& engine = *engines[static_cast<std::size_t>(rank)];
        std::vector<float> data(3);
        if (rank == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          dies ? engine.abort("rank 1 gives up") : engine.shutdown();
          return;
        }
        if (rank == 0) CHECK(soon([&] { return told.load(); }));
        if (rank == 2) {
          const Status status = run(engine, send_entry("x", 1, 2, data));
          CHECK_STATUS(status, StatusCode::kRankFailed);
          CHECK_EQ(status.failed_rank(), 1);
          CHECK(has(status.message(),
                    dies ? "rank 1 gives up"
                         : "rank 1 left after 0 collectives, but send 'x' from rank 1 to "
                           "rank 2 waits for it"));
          told = true;
        }
        engine.shutdown();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}
