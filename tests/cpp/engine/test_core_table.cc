// The engine through its table of C functions, as a library that is not linked with it calls it:
// what ends a call at once. What the calls give is in test_tensorflow_gpu.cc.
#include <limits>

#include "api/c_api.h"
#include "backend/self_backend.h"
#include "check.h"
#include "engine/engine.h"

using namespace hvdlite;

namespace {

// The result that one call of `done` brought.
struct Ending {
  Mutex mutex;
  Condition changed;
  int calls HVDLITE_GUARDED_BY(mutex) = 0;
  int code HVDLITE_GUARDED_BY(mutex) = -1;

  static void take(void* context, const HvdliteResult* result) {
    auto& self = *static_cast<Ending*>(context);
    MutexLock lock(self.mutex);
    ++self.calls;
    self.code = result->code;
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

}  // namespace

TEST(core_table_ends_a_refused_call_at_once) {
  Engine engine(nullptr, std::make_unique<SelfBackend>(), Config());
  Floats floats({1.0F});
  Ending ending;
  const HvdliteTensor tensor = floats.tensor("x");
  HvdliteCall call = call_of(Kind::kAllreduce, "x", tensor, ending);
  call.prescale = std::numeric_limits<double>::infinity();
  submit(engine, call);
  MutexLock lock(ending.mutex);
  CHECK_EQ(ending.calls, 1);
  CHECK_EQ(ending.code, static_cast<int>(StatusCode::kInvalidArgument));
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
