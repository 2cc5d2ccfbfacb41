// TensorFlow's kernels for GPUs, in the library that is shipped, on fakes of TensorFlow, the
// driver and NCCL: two ranks as threads, each with its own engine behind the one attached core.
#include <dlfcn.h>

#include <cmath>
#include <future>
#include <map>
#include <numeric>

#include "engine/c_api.h"
#include "fakes/tensorflow/hooks.h"
#include "gpu_engines.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

thread_local Engine* t_engine = nullptr;  // the engine of this thread's rank

void submit_for_this_rank(void*, const HvdliteCall* call) {
  const HvdliteCore core = make_core_table(*t_engine);
  core.submit(core.engine, call);
}

constexpr HvdliteCore kRouter = {kCoreTableVersion, nullptr, &submit_for_this_rank, nullptr};

void* load(const char* file) {
  void* library = ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr);
  return library;
}

// The kernels that the library registered, loaded once.
const std::vector<TF_KernelBuilder>& kernels() {
  static void* tensorflow = load(TENSORFLOW_DOUBLE);
  static void* operations = load(TENSORFLOW_OPERATIONS);
  static const bool attached = [] {
    const auto attach = reinterpret_cast<bool (*)(const HvdliteCore*, const void*)>(
        ::dlsym(operations, "hvdlite_tensorflow_attach"));
    return attach(&kRouter, nullptr);
  }();
  CHECK(attached);
  return *reinterpret_cast<FakeKernels*>(::dlsym(tensorflow, "fake_tensorflow_kernels"))();
}

const TF_KernelBuilder& kernel(const std::string& op) {
  for (const TF_KernelBuilder& one : kernels()) {
    if (one.op == op && one.device == "GPU") return one;
  }
  CHECK(false);
  return kernels().front();
}

template <typename T>
TF_Tensor on_host(TF_DataType dtype, std::vector<T> values) {
  const auto held = std::make_shared<std::vector<T>>(std::move(values));
  return {dtype, {static_cast<std::int64_t>(held->size())}, {held, held->data()}};
}

// One call of a kernel, on one thread of a rank; TensorFlow's stream is the framework's producer.
class Call {
 public:
  Call(const std::string& op, const std::string& name, Framework& gpu, ReduceOp reduce)
      : kernel_(kernel(op)), gpu_(gpu) {
    TF_OpKernelConstruction construction{name, 0, static_cast<std::int32_t>(reduce)};
    node_ = kernel_.create(&construction);
    context.stream = gpu.producer;
    context.allocate = [this](int output, std::size_t bytes) -> std::shared_ptr<void> {
      if (output > 0) return std::shared_ptr<void>(::operator new(bytes), Free());  // sizes
      return memory(bytes);
    };
  }
  ~Call() { kernel_.destroy(node_); }

  std::shared_ptr<void> memory(std::size_t bytes) {
    const auto held = std::make_shared<OnDevice>(*gpu_.device, gpu_.producer, bytes);
    return {held, held->data()};
  }
  void give(float value, std::size_t count) {
    context.inputs.push_back({TF_FLOAT, {static_cast<std::int64_t>(count)}, memory(count * 4)});
    std::vector<float> values(count, value);
    copy(context.inputs[0].memory.get(), values.data(), count);
    synchronize();  // `values` may go
  }
  void set_zero(std::size_t count) {
    const CudaDevice::Current current(*gpu_.device);
    CHECK_EQ(gpu_.device->api().fill(device_address(context.inputs[0].memory.get()), 0, count * 4,
                                     gpu_.producer),
             0);
  }
  void add_terms() {
    context.inputs.push_back(on_host<double>(TF_DOUBLE, {-1, 1, 1, std::nan("")}));
  }
  // Returns when TensorFlow would go on.
  const std::string& start() {
    std::promise<void> ended;
    {
      std::function<void()> done = [&] { ended.set_value(); };
      const CudaDevice::Current current(*gpu_.device);  // as TensorFlow does
      kernel_.compute(node_, &context, reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&done));
      done = nullptr;  // it was on the executor's stack
    }
    ended.get_future().wait();
    return context.failure;
  }
  // Then TensorFlow's next kernel overwrites the input's memory, and another reads the output into
  // `result`. Both are work of its stream.
  void run() {
    CHECK_EQ(start(), "");
    if (!context.failure.empty()) return;
    const CudaDevice::Current current(*gpu_.device);
    const TF_Tensor& input = context.inputs[0];
    CHECK_EQ(gpu_.device->api().fill(device_address(input.memory.get()), 0xee,
                                     static_cast<std::size_t>(input.dims[0]) * 4, gpu_.producer),
             0);
    const TF_Tensor& output = context.outputs.at(0);
    result.resize(static_cast<std::size_t>(output.dims[0]));
    CHECK_EQ(gpu_.device->api().copy_to_host(result.data(), device_address(output.memory.get()),
                                             result.size() * 4, gpu_.producer),
             0);
  }
  void synchronize() {
    const CudaDevice::Current current(*gpu_.device);
    testing::synchronize(gpu_.producer);
  }
  std::vector<std::int64_t> sizes() const {
    const auto* values = static_cast<const std::int64_t*>(context.outputs.at(1).memory.get());
    const auto& dims = context.outputs[1].dims;
    return {values, values + std::accumulate(dims.begin(), dims.end(), std::int64_t{1},
                                             std::multiplies<>())};
  }

  TF_OpKernelContext context;
  std::vector<float> result;

 private:
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory); }
  };
  void copy(void* to, const float* from, std::size_t count) {
    const CudaDevice::Current current(*gpu_.device);
    CHECK_EQ(gpu_.device->api().copy_to_device(device_address(to), from, count * 4, gpu_.producer),
             0);
  }

  const TF_KernelBuilder& kernel_;
  Framework& gpu_;
  void* node_ = nullptr;
};

// Runs one kernel per rank with sevens of rank 0 and zeros of rank 1, written late. The stream of
// rank `late` is held until the kernels of both have ended for TensorFlow.
std::vector<float> run_kernel(const std::string& op, int rank, Engine& engine, Framework& gpu,
                              std::size_t count, int late,
                              std::vector<std::int64_t>* sizes = nullptr,
                              std::vector<std::int64_t> splits = {}) {
  t_engine = &engine;
  Call call(op, op + std::to_string(late), gpu, ReduceOp::kSum);
  call.give(7.0F, count);
  if (rank == late) hold(gpu.producer, true);
  if (rank == 1) call.set_zero(count);  // the tensor to send
  if (op == "HvdliteAlltoall") call.context.inputs.push_back(on_host(TF_INT64, std::move(splits)));
  call.add_terms();
  const std::int64_t syncs = gpu_counters(gpu.ordinal).host_syncs;
  call.run();
  std::this_thread::sleep_for(50ms);  // time for a kernel that fails to wait
  CHECK_EQ(gpu_counters(gpu.ordinal).host_syncs, syncs);
  std::vector<float> none(1);
  CHECK_OK(run(engine, allreduce_entry("all were here", none)));
  if (rank == late) hold(gpu.producer, false);
  call.synchronize();
  if (sizes != nullptr) *sizes = call.sizes();
  return call.result;
}

std::vector<float> floats(std::size_t sevens, std::size_t zeros) {
  std::vector<float> values(sevens, 7.0F);
  values.insert(values.end(), zeros, 0.0F);
  return values;
}

}  // namespace

TEST(tensorflow_registers_its_kernels_for_gpus_too) {
  std::map<std::string, int> counts;
  for (const TF_KernelBuilder& one : kernels()) ++counts[one.op + " " + one.device];
  // One for all types: see register_async().
  for (const char* op : {"HvdliteAllreduce", "HvdliteReducescatter", "HvdliteBroadcast",
                         "HvdliteAllgather", "HvdliteAlltoall"}) {
    CHECK_EQ(counts[std::string(op) + " GPU"], 1);
    CHECK_EQ(counts[std::string(op) + " CPU"], 1);
  }
  CHECK_EQ(counts["HvdliteQuery GPU"], 1);
  CHECK(kernel("HvdliteAllgather").on_host == (std::vector<std::string>{"terms", "sizes"}));
  CHECK(kernel("HvdliteAlltoall").on_host ==
        (std::vector<std::string>{"terms", "splits", "received_splits"}));
}

TEST(tensorflow_kernels_on_a_gpu_follow_and_are_followed_by_their_stream) {
  for (const int late : {0, 1}) {
    GpuWorld().run([&](int rank, Engine& engine, Framework& gpu) {
      const auto run = [&](const char* op, std::size_t count, auto... more) {
        return run_kernel(op, rank, engine, gpu, count, late, more...);
      };
      const std::size_t own = rank == 0 ? 0 : 1;
      std::vector<std::int64_t> sizes;
      CHECK(run("HvdliteAllreduce", 300) == floats(300, 0));
      CHECK(run("HvdliteBroadcast", 300) == floats(300, 0));
      CHECK(run("HvdliteReducescatter", 301) == floats(151 - own, 0));
      CHECK(run("HvdliteAllgather", 100 + own, &sizes) == floats(100, 101));
      CHECK(sizes == (std::vector<std::int64_t>{100, 101}));
      const std::vector<std::int64_t> splits = {100, 200};
      CHECK(run("HvdliteAlltoall", 300, &sizes, splits) ==
            (rank == 0 ? floats(100, 100) : floats(200, 200)));
      CHECK(sizes == std::vector<std::int64_t>(2, rank == 0 ? 100 : 200));
    });
  }
}

TEST(tensorflow_kernels_on_a_gpu_take_tensors_without_elements) {
  GpuWorld().run([&](int rank, Engine& engine, Framework& gpu) {
    CHECK(run_kernel("HvdliteAllreduce", rank, engine, gpu, 0, 0).empty());
  });
}

TEST(tensorflow_kernels_on_a_gpu_end_with_the_error_of_a_lost_rank) {
  GpuWorld().run([&](int rank, Engine& engine, Framework& gpu) {
    t_engine = &engine;
    std::vector<float> none(1);
    CHECK_OK(run(engine, allreduce_entry("begin", none)));
    if (rank == 1) return engine.abort("rank 1 gave up");
    Call call("HvdliteAllreduce", "alone", gpu, ReduceOp::kSum);
    call.give(1.0F, 10);
    call.add_terms();
    CHECK(call.start().find("rank 1 gave up") != std::string::npos);
  });
}
