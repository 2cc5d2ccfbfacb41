// The engine through its table of C functions, as a library that is not linked with it calls it.
#include <limits>
#include <thread>

#include "api/c_api.h"
#include "backend/self_backend.h"
#include "check.h"
#include "engine/engine.h"
#include "host/host_backend.h"
#include "testing/inproc_world.h"

using namespace hvdlite;
using namespace std::chrono_literals;

namespace {

// The result that one call of `done` brought.
struct Ending {
  Mutex mutex;
  Condition changed;
  int calls HVDLITE_GUARDED_BY(mutex) = 0;
  int code HVDLITE_GUARDED_BY(mutex) = -1;
  std::string message HVDLITE_GUARDED_BY(mutex);
  std::vector<std::int64_t> first_dimensions HVDLITE_GUARDED_BY(mutex);
  std::vector<float> output HVDLITE_GUARDED_BY(mutex);

  static void take(void* context, const HvdliteResult* result) {
    auto& self = *static_cast<Ending*>(context);
    MutexLock lock(self.mutex);
    ++self.calls;
    self.code = result->code;
    self.message = result->message;
    self.first_dimensions.assign(result->first_dimensions,
                                 result->first_dimensions + result->parts * result->count);
    for (int i = 0; i < result->count; ++i) {
      std::vector<float> values(result->output_bytes[i] / sizeof(float));
      CHECK(result->copy_output(result, i, values.data()));
      self.output.insert(self.output.end(), values.begin(), values.end());
    }
    self.changed.notify_all();
  }
  int wait() {
    MutexLock lock(mutex);
    while (calls == 0) changed.wait(mutex);
    return code;
  }
};

struct Floats {
  explicit Floats(std::vector<float> values)
      : data(std::move(values)), dims{static_cast<std::int64_t>(data.size())} {}
  HvdliteTensor tensor(const char* name) {
    const auto dtype = static_cast<int>(DataType::kFloat32);
    return {name, dtype, dtype, 0, 1, dims, data.data(), data.data()};
  }
  std::vector<float> data;
  std::int64_t dims[1];
};

HvdliteCall call_of(Kind kind, const char* name, const HvdliteTensor& tensor, Ending& ending) {
  HvdliteCall call{};
  call.kind = static_cast<int>(kind);
  call.op = static_cast<int>(ReduceOp::kSum);
  call.prescale = call.postscale = 1.0;
  call.weight = std::numeric_limits<double>::quiet_NaN();
  call.name = name;
  call.count = 1;
  call.tensors = &tensor;
  call.done = &Ending::take;
  call.context = &ending;
  return call;
}

void submit(Engine& engine, const HvdliteCall& call) {
  const HvdliteCore core = make_core_table(engine);
  CHECK_EQ(core.version, kCoreTableVersion);
  core.submit(core.engine, &call);
}

void run_pair(const std::function<void(int, Engine&)>& body) {
  Config config;
  config.log_level = "error";
  auto fabrics = make_inproc_world({0, 0}, config);
  CHECK_OK(fabrics.status());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      auto& fabric = fabrics.value()[static_cast<std::size_t>(rank)];
      auto backend = std::make_unique<HostBackend>(*fabric, config);
      Engine engine(std::move(fabric), std::move(backend), config);
      body(rank, engine);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST(core_table_reduces_and_tells_when_it_is_done) {
  run_pair([](int rank, Engine& engine) {
    Floats floats({1.0F + static_cast<float>(rank), 5.0F});
    Ending ending;
    const HvdliteTensor tensor = floats.tensor("x");
    submit(engine, call_of(Kind::kAllreduce, "x", tensor, ending));
    CHECK_EQ(ending.wait(), 0);
    CHECK(floats.data == (std::vector<float>{3.0F, 10.0F}));
  });
}

TEST(core_table_hands_over_what_was_gathered) {
  run_pair([](int rank, Engine& engine) {
    Floats floats(std::vector<float>(static_cast<std::size_t>(rank) + 1, static_cast<float>(rank)));
    Ending ending;
    const HvdliteTensor tensor = floats.tensor("x");
    submit(engine, call_of(Kind::kAllgather, "x", tensor, ending));
    CHECK_EQ(ending.wait(), 0);
    MutexLock lock(ending.mutex);
    CHECK(ending.first_dimensions == (std::vector<std::int64_t>{1, 2}));
    CHECK(ending.output == (std::vector<float>{0.0F, 1.0F, 1.0F}));
  });
}

TEST(core_table_hands_over_what_was_exchanged_and_scattered) {
  run_pair([](int rank, Engine& engine) {
    Floats floats({1.0F + static_cast<float>(rank), 5.0F, 6.0F});
    const std::int64_t splits[] = {rank, 3 - rank};
    Ending exchanged;
    const HvdliteTensor tensor = floats.tensor("x");
    HvdliteCall call = call_of(Kind::kAlltoall, "x", tensor, exchanged);
    call.split_count = 2;
    call.splits = splits;
    submit(engine, call);
    CHECK_EQ(exchanged.wait(), 0);
    Ending scattered;
    submit(engine, call_of(Kind::kReducescatter, "y", tensor, scattered));
    CHECK_EQ(scattered.wait(), 0);
    MutexLock lock(exchanged.mutex);
    CHECK(exchanged.first_dimensions ==
          (rank == 0 ? std::vector<std::int64_t>{0, 1} : std::vector<std::int64_t>{3, 2}));
    CHECK(exchanged.output == (rank == 0 ? std::vector<float>{2.0F}
                                         : std::vector<float>{1.0F, 5.0F, 6.0F, 5.0F, 6.0F}));
    MutexLock second(scattered.mutex);
    CHECK(scattered.first_dimensions == (std::vector<std::int64_t>{rank == 0 ? 2 : 1}));
    CHECK(scattered.output ==
          (rank == 0 ? std::vector<float>{3.0F, 10.0F} : std::vector<float>{12.0F}));
  });
}

TEST(core_table_ends_a_refused_call_at_once) {
  run_pair([](int, Engine& engine) {
    Floats floats({1.0F});
    Ending ending;
    const HvdliteTensor tensor = floats.tensor("x");
    HvdliteCall call = call_of(Kind::kAllreduce, "x", tensor, ending);
    call.prescale = std::numeric_limits<double>::infinity();
    submit(engine, call);
    MutexLock lock(ending.mutex);
    CHECK_EQ(ending.calls, 1);
    CHECK_EQ(ending.code, static_cast<int>(StatusCode::kInvalidArgument));
  });
}

TEST(core_table_continuation_may_submit_in_a_world_of_one) {
  Engine engine(nullptr, std::make_unique<SelfBackend>(), Config());
  Floats floats({1.0F});
  Ending second;
  const HvdliteTensor tensor = floats.tensor("x");
  std::vector<float> values(1, 2.0F);
  auto first = std::make_shared<Entry>();
  first->request.name = "first";
  first->request.tensors = {{"first", DataType::kFloat32, {1}}};
  first->inputs = {values.data()};
  first->outputs = {values.data()};
  first->completion->then([&] { submit(engine, call_of(Kind::kAllreduce, "x", tensor, second)); });
  CHECK_OK(engine.enqueue(first, /*blocking=*/false));
  CHECK_EQ(second.wait(), 0);
}

TEST(core_table_ends_what_is_in_flight_when_the_world_ends) {
  run_pair([](int rank, Engine& engine) {
    if (rank == 1) {
      engine.abort("rank 1 gave up");
      return;
    }
    Floats floats({1.0F});
    Ending ending;
    const HvdliteTensor tensor = floats.tensor("x");
    submit(engine, call_of(Kind::kAllreduce, "x", tensor, ending));
    CHECK_EQ(ending.wait(), static_cast<int>(StatusCode::kRankFailed));
    MutexLock lock(ending.mutex);
    CHECK(ending.message.find("rank 1 gave up") != std::string::npos);
    CHECK_EQ(ending.calls, 1);
  });
}
