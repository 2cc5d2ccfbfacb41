// Whole engines with roll calls: ranks that sleep are left out, and what they have comes later.
#include <atomic>
#include <barrier>

#include "check.h"
#include "engine_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

constexpr const char* kKey = "optimizer";

RollCall call_of(std::uint64_t step, std::uint32_t quorum, std::uint32_t bound = 4) {
  return {kKey, step, quorum, /*grace_us=*/0, bound, /*fold=*/true};
}

EntryPtr bucket(const std::string& name, std::vector<float>& values, RollCall call) {
  EntryPtr entry = allreduce_entry(name, values, ReduceOp::kAverage);
  entry->request.weighted = true;
  entry->request.roll = std::move(call);
  return entry;
}

}  // namespace

// Rank 1 is late in step 1: its gradient is in no result of that step, and in that of step 2.
TEST(engine_roll_goes_on_without_a_late_rank_and_folds_its_gradient) {
  for (const Hosts& hosts : {Hosts{0, 0}, Hosts{0, 1}}) {
    std::barrier seen(2);
    run_world(hosts, [&](int rank, Engine& engine) {
      const float own = rank == 0 ? 1.0F : 3.0F;
      const auto step = [&](std::uint64_t number, bool& late) {
        std::vector<float> values(5, own * static_cast<float>(number + 1));
        const EntryPtr entry = bucket("grad", values, call_of(number, 1));
        CHECK_OK(run(engine, entry));
        late = entry->completion->late;
        return values;
      };
      bool late = true;
      CHECK_EQ(step(0, late), std::vector<float>(5, 2.0F));
      CHECK(!late);
      seen.arrive_and_wait();
      if (rank == 1) {
        CHECK(soon([&] { return engine.parked(kKey) == 1; }));
      }
      CHECK_EQ(step(1, late), std::vector<float>(5, 2.0F));
      CHECK_EQ(late, rank == 1);
      CHECK_EQ(engine.parked(kKey), 0);
      seen.arrive_and_wait();
      if (rank == 1) {
        // (3 + 2 * 3) from this rank, whose own is late again; see the next step.
        CHECK(soon([&] { return engine.parked(kKey) == 1; }));
      }
      CHECK_EQ(step(2, late), std::vector<float>(5, (3.0F + 6.0F) / 2));
      CHECK_EQ(late, rank == 1);
      CHECK_EQ(engine.attendance(kKey)[1].late, std::uint64_t{2});
    });
  }
}
