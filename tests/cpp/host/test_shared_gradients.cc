// Gradient memory that the ranks of a host share: where it comes from, and all-reduces of tensors
// that lie in it, which give the same bits as those that are staged.
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "backend_worlds.h"
#include "check.h"
#include "transport/segment.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kAlignment = 16;

// One rank of a world of threads.
struct HostRank {
  int rank;
  Fabric& fabric;
  HostBackend& backend;
  const Group& world;
  Counter& unstaged;
};

// Runs the body on a thread per rank of one host. Returns the bytes that each did not stage.
std::vector<std::uint64_t> run_ranks(int size, const std::function<void(HostRank)>& body) {
  const Config config = small_config();
  auto fabrics = make_inproc_world(Hosts(static_cast<std::size_t>(size), 0), config);
  CHECK_OK(fabrics.status());
  const ProcessSets sets(size);
  std::vector<Counter> unstaged(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Fabric& fabric = *fabrics.value()[static_cast<std::size_t>(rank)];
      HostBackend backend(fabric, config);
      Counter elsewhere;
      Counter& own = unstaged[static_cast<std::size_t>(rank)];
      backend.count_in(elsewhere, own);
      body({rank, fabric, backend, *sets.get(0), own});
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::uint64_t> bytes;
  for (const Counter& one : unstaged) bytes.push_back(one.get());
  return bytes;
}

// Tensors of a batch, one behind the other in gradient memory, and copies of them in memory of
// their own.
struct TensorsInMemory {
  GradientArea::Part part;
  std::vector<std::vector<std::byte>> apart;
  std::vector<Piece> shared_pieces;
  std::vector<Piece> apart_pieces;
};

TensorsInMemory make_tensors(const HostRank& on, DataType dtype,
                             const std::vector<std::size_t>& counts, std::size_t gap = kAlignment,
                             double postscale = 1.0) {
  TensorsInMemory made;
  std::size_t bytes = 0;
  const auto padded = [&](std::size_t count) {
    return (count * size_of(dtype) + gap - 1) / gap * gap;
  };
  for (const std::size_t count : counts) bytes += padded(count);
  made.part = on.fabric.gradients->lend(bytes);
  CHECK(made.part != nullptr);
  std::size_t at = 0;
  for (const std::size_t count : counts) {
    std::byte* shared = made.part->data() + at;
    for (std::size_t i = 0; i < count; ++i) {
      store(dtype, shared + i * size_of(dtype), value_of(on.rank, i + at));
    }
    made.apart.emplace_back(shared, shared + count * size_of(dtype));
    made.shared_pieces.push_back({shared, shared, count, 1.0, postscale});
    at += padded(count);
  }
  for (auto& tensor : made.apart) {
    made.apart_pieces.push_back(
        {tensor.data(), tensor.data(), tensor.size() / size_of(dtype), 1.0, postscale});
  }
  return made;
}

void check_equal(const TensorsInMemory& tensors, DataType dtype) {
  for (std::size_t i = 0; i < tensors.apart.size(); ++i) {
    const Piece& piece = tensors.shared_pieces[i];
    const std::size_t bytes = piece.count * size_of(dtype);
    CHECK(bytes == 0 || std::memcmp(piece.output, tensors.apart[i].data(), bytes) == 0);
  }
}

// Reduces the tensors where they are shared and where they are not, and compares the bits.
void compare(const HostRank& on, const Group& group, DataType dtype, ReduceOp op,
             TensorsInMemory tensors) {
  CHECK_OK(on.backend.allreduce({group, dtype, op, tensors.apart_pieces}, kPatience));
  CHECK_OK(on.backend.allreduce({group, dtype, op, tensors.shared_pieces}, kPatience));
  check_equal(tensors, dtype);
}

}  // namespace

TEST(shared_gradients_give_the_bits_that_staging_gives) {
  for (const int size : {2, 3, 5}) {
    for (const DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kInt32,
                                 DataType::kUint8, DataType::kFloat64}) {
      const std::vector<std::size_t> counts = {1, 7000, 0, 333, 40'001};
      const std::uint64_t bytes = (1 + 7000 + 333 + 40'001) * size_of(dtype);
      const auto unstaged = run_ranks(size, [&](const HostRank& on) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax}) {
          compare(on, on.world, dtype, op, make_tensors(on, dtype, counts, kAlignment, 0.5));
        }
      });
      // All but the first two chunks, three times.
      const std::uint64_t staged = 2 * small_config().shm_chunk;
      for (const std::uint64_t one : unstaged) CHECK_EQ(one, 3 * (bytes - staged));
    }
  }
}

TEST(shared_gradients_are_staged_where_a_rank_has_them_elsewhere) {
  using Change = std::function<void(const HostRank&, TensorsInMemory&)>;
  const std::vector<std::size_t> counts = {5000, 5000};
  const std::vector<Change> changes = {
      // Not in gradient memory.
      [](const HostRank&, TensorsInMemory& tensors) {
        tensors.shared_pieces[1] = tensors.apart_pieces[1];
      },
      // With other gaps.
      [&](const HostRank& on, TensorsInMemory& tensors) {
        tensors = make_tensors(on, DataType::kFloat32, counts, 128 << 10);
      },
      // Not in place.
      [](const HostRank&, TensorsInMemory& tensors) {
        tensors.shared_pieces[0].input = tensors.apart_pieces[0].input;
      },
      // Scaled on the way in.
      [](const HostRank&, TensorsInMemory& tensors) { tensors.shared_pieces[0].prescale = 2.0; }};
  for (const Change& change : changes) {
    const auto unstaged = run_ranks(3, [&](const HostRank& on) {
      TensorsInMemory tensors = make_tensors(on, DataType::kFloat32, counts);
      if (on.rank == 1) change(on, tensors);
      const TensorsInMemory plain = make_tensors(on, DataType::kFloat32, counts);
      std::vector<Piece> pieces = plain.apart_pieces;
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        pieces[i].prescale = tensors.shared_pieces[i].prescale;
        std::memcpy(pieces[i].output, tensors.shared_pieces[i].input, pieces[i].count * 4);
      }
      const Group& world = on.world;
      CHECK_OK(
          on.backend.allreduce({world, DataType::kFloat32, ReduceOp::kSum, pieces}, kPatience));
      CHECK_OK(on.backend.allreduce(
          {world, DataType::kFloat32, ReduceOp::kSum, tensors.shared_pieces}, kPatience));
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        const Piece& piece = tensors.shared_pieces[i];
        CHECK(std::memcmp(piece.output, pieces[i].output, piece.count * 4) == 0);
      }
    });
    for (const std::uint64_t one : unstaged) CHECK_EQ(one, 0u);
  }
}

TEST(shared_gradients_are_saved_before_they_are_overwritten) {
  run_ranks(3, [](const HostRank& on) {
    TensorsInMemory tensors = make_tensors(on, DataType::kFloat32, {30'000, 20'000});
    const auto inputs = tensors.apart;
    auto saved = inputs;
    std::vector<InputCopy> copies(2);
    for (std::size_t i = 0; i < 2; ++i) {
      std::fill(saved[i].begin(), saved[i].end(), std::byte{0});
      copies[i].to = saved[i].data();
      tensors.shared_pieces[i].copy = &copies[i];
    }
    compare(on, on.world, DataType::kFloat32, ReduceOp::kSum, std::move(tensors));
    CHECK(saved == inputs);
    CHECK(on.unstaged.get() > 0);
  });
}

TEST(shared_gradients_of_random_batches_and_process_sets_give_the_bits_that_staging_gives) {
  const auto unstaged = run_ranks(4, [](const HostRank& on) {
    const std::vector<Group> groups = {on.world, {1, {0, 2}, 1}, {2, {1, 2, 3}, 2}};
    std::mt19937 same(7);                                    // on all ranks
    std::mt19937 own(static_cast<unsigned>(100 + on.rank));  // on this one
    for (int round = 0; round < 60; ++round) {
      const Group& group = groups[same() % groups.size()];
      std::vector<std::size_t> counts(1 + same() % 4);
      for (std::size_t& count : counts) count = same() % 3 == 0 ? same() % 50 : same() % 30'000;
      ++counts[0];
      const ReduceOp op = same() % 2 == 0 ? ReduceOp::kSum : ReduceOp::kAverage;
      if (group.index_of(on.rank) < 0) continue;
      const std::size_t gap = own() % 8 == 0 ? 4096 : kAlignment;
      compare(on, group, DataType::kFloat32, op, make_tensors(on, DataType::kFloat32, counts, gap));
    }
  });
  for (const std::uint64_t one : unstaged) CHECK(one > 0);
}

TEST(shared_gradients_name_the_rank_that_is_lost_or_makes_no_progress) {
  for (const bool lost : {true, false}) {
    std::atomic<int> ended{0};
    run_ranks(3, [&](const HostRank& on) {
      const TensorsInMemory tensors = make_tensors(on, DataType::kFloat32, {400'000});
      const Allreduce call{on.world, DataType::kFloat32, ReduceOp::kSum, tensors.shared_pieces};
      CHECK_OK(on.backend.allreduce(call, kPatience));
      if (on.rank == 1) {
        if (lost) {
          std::this_thread::sleep_for(20ms);
          on.fabric.close();
        }
        // It is there until the others have given up, or something hangs.
        const auto limit = std::chrono::steady_clock::now() + 2min;
        while (!lost && ended < 2 && std::chrono::steady_clock::now() < limit) {
          std::this_thread::sleep_for(1ms);
        }
        return;
      }
      // The other of these two may come a little later.
      const Status status = on.backend.allreduce(call, lost ? kPatience : Patience(1s));
      ++ended;
      CHECK_STATUS(status, lost ? StatusCode::kRankFailed : StatusCode::kTimeout);
      CHECK_EQ(status.failed_rank(), 1);
    });
  }
}

TEST(gradient_area_lends_what_fits_and_takes_it_back) {
  SegmentLayout layout = SegmentLayout::make(2, Config());
  layout.gradient_bytes = 1 << 20;
  const auto segment = make_segment(layout);
  CHECK_OK(segment.status());
  const auto area = std::make_shared<GradientArea>(segment.value());
  CHECK(area->lend(0) == nullptr);
  CHECK(area->lend((1 << 20) + 1) == nullptr);
  GradientArea::Part all = area->lend(1 << 20);
  CHECK_EQ(all->size(), std::size_t{1} << 20);
  CHECK(area->lend(1) == nullptr);
  (*all)[5000] = std::byte{7};
  all.reset();
  std::vector<GradientArea::Part> parts;
  for (int i = 0; i < 4; ++i) parts.push_back(area->lend(100'000));
  CHECK(parts[1]->data() >= parts[0]->data() + 100'000);
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(parts[1]->data()) % 4096, 0u);
  CHECK((*parts[0])[5000] == std::byte{0});  // given back to the system meanwhile
  const std::byte* second = parts[1]->data();
  parts[1].reset();
  parts[1] = area->lend(90'000);
  CHECK(parts[1]->data() == second);
  parts[2].reset();
  CHECK(area->lend(200'000)->data() > parts[3]->data());
}

TEST(gradient_area_is_seen_by_peers_and_outlives_its_fabric) {
  Config config;
  config.shm_gradients = 1 << 20;
  const SegmentLayout layout = SegmentLayout::make(2, config);
  const Result<Fd> memfd = Segment::create(layout);
  CHECK_OK(memfd.status());
  const auto peer = Segment::map(memfd.value());
  CHECK_OK(peer.status());
  GradientArea::Part part;
  {
    const auto own = Segment::map(memfd.value());
    CHECK_OK(own.status());
    part = std::make_shared<GradientArea>(own.value())->lend(10'000);
  }
  const std::byte* seen = peer.value()->gradients().data();
  (*part)[9'999] = std::byte{3};
  CHECK(seen[9'999] == std::byte{3});
  part.reset();
  CHECK(seen[9'999] == std::byte{0});  // the memory has been given back
}

TEST(gradient_area_has_no_room_on_a_host_of_one_rank_or_where_a_limit_or_the_knob_says_so) {
  CHECK_EQ(SegmentLayout::make(1, Config()).gradient_bytes, 0u);
  rlimit before{};
  CHECK_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  rlimit limited = before;
  limited.rlim_cur = RLIM_INFINITY - 1;  // enough for sanitizers
  CHECK_EQ(::setrlimit(RLIMIT_AS, &limited), 0);
  CHECK_EQ(SegmentLayout::make(2, Config()).gradient_bytes, 0u);
  CHECK_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  Config config;
  config.shm_gradients = 0;
  const SegmentLayout layout = SegmentLayout::make(2, config);
  CHECK_EQ(layout.gradient_bytes, 0u);
  const auto segment = make_segment(layout);
  CHECK_OK(segment.status());
  CHECK(std::make_shared<GradientArea>(segment.value())->lend(1) == nullptr);
}
