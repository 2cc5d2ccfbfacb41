// Every wait between streams is needed: with any one of them taken away, the scenario goes wrong
// every time, because the stream that is waited for is held.
#include <thread>

#include "gpu_engines.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

extern "C" void __tsan_init() __attribute__((weak));  // NOLINT: its own name

namespace {

bool under_thread_sanitizer() { return &__tsan_init != nullptr; }

constexpr std::size_t kCount = 300;

// Numbers the waits of rank 0. The wait of number `skipped` is left out.
std::atomic<int> waits{0};
std::atomic<int> skipped{-1};
std::atomic<int (*)(CudaStream, CudaEventHandle, unsigned)> real_wait{nullptr};

int counted_wait(CudaStream stream, CudaEventHandle event, unsigned flags) {
  const bool rank_0 = gpu_hook<decltype(fake_current_device)>("fake_current_device") == 0;
  if (rank_0 && waits++ == skipped) return kCudaSuccess;
  return real_wait.load()(stream, event, flags);
}

GpuLibraries counting_libraries() {
  GpuLibraries libraries = gpu_libraries();
  libraries.cuda = []() -> Result<std::shared_ptr<const CudaApi>> {
    const auto loaded = gpu_libraries().cuda();
    HVDLITE_RETURN_IF_ERROR(loaded.status());
    // A table of its own whose library, the fake, stays loaded.
    auto table = std::make_shared<CudaApi>();
#define COPY_FIELD(field, symbol, arguments) table->field = loaded.value()->field;
    HVDLITE_CUDA_SYMBOLS(COPY_FIELD)
#undef COPY_FIELD
    table->devices = loaded.value()->devices;
    real_wait = table->stream_wait;
    table->stream_wait = &counted_wait;
    return std::shared_ptr<const CudaApi>(std::move(table));
  };
  return libraries;
}

void set_zero(Framework& gpu, const OnDevice& tensor, CudaStream stream) {
  const CudaDevice::Current current(*gpu.device);
  CHECK_EQ(gpu.device->api().fill(device_address(tensor.data()), 0, kCount * sizeof(float), stream),
           0);
}

// Tensors that their producer writes late, in place. False when rank 0 has a wrong result.
bool reduce_behind_a_held_producer(int rank, Engine& engine, Framework& gpu) {
  const OnDevice tensor = gpu.tensor(std::vector<float>(kCount, 7.0F));
  if (rank == 0) hold(gpu.producer, true);
  set_zero(gpu, tensor, gpu.producer);  // the value to be sent
  const EntryPtr entry = gpu.entry("held", tensor, kCount);
  CHECK_OK(run(engine, entry));  // although nothing has run on the device
  CudaDevice& device = entry->completion->on_device->device();
  CHECK_OK(device.wait(gpu.consumer, *entry->completion->on_device));
  std::vector<float> result(kCount, -1.0F);
  {
    const CudaDevice::Current current(*gpu.device);
    CHECK_EQ(gpu.device->api().copy_to_host(result.data(), device_address(tensor.data()),
                                            kCount * sizeof(float), gpu.consumer),
             0);
  }
  // Gives a stream that fails to wait the time to go wrong. If rank 0 has left out a wait, its
  // consumer's stream ends by itself.
  const CudaEventPtr end = OnDevice::must(gpu.device->record(gpu.consumer));
  const bool ends = rank == 0 && skipped >= 0;
  soon([&] { return end->reached(); }, ends ? 10s : 50ms);
  if (rank == 0) hold(gpu.producer, false);
  const CudaDevice::Current current(*gpu.device);
  synchronize(gpu.consumer);
  return result == std::vector<float>(kCount, 0.0F);
}

// Gradient memory that its producer, an optimizer, still reads when new gradients are packed into
// it. False when rank 0 reads the new ones.
bool reduce_into_gradient_memory_that_is_read_late(int rank, Engine& engine, Framework& gpu) {
  constexpr std::size_t kBytes = kCount * sizeof(float);
  const GradientMemory::Holder memory =
      OnDevice::must(engine.allocate_gradient_memory(gpu.ordinal, 2 * kBytes));
  const OnDevice tensor = gpu.tensor(std::vector<float>(kCount, 5.0F));
  const EntryPtr entry = gpu.entry("gradients", tensor, kCount);
  entry->request.tensors.push_back(entry->request.tensors[0]);
  entry->inputs.push_back(tensor.data());
  entry->outputs = {reinterpret_cast<void*>(memory->address),
                    reinterpret_cast<void*>(memory->address + kBytes)};
  const CudaDevice::Current current(*gpu.device);
  std::vector<float> values(kCount, 1.0F);
  CHECK_EQ(gpu.device->api().copy_to_device(memory->address, values.data(), kBytes, gpu.producer),
           0);
  synchronize(gpu.producer);
  if (rank == 0) hold(gpu.producer, true);
  CHECK_EQ(gpu.device->api().copy_to_host(values.data(), memory->address, kBytes, gpu.producer), 0);
  CHECK_OK(run(engine, entry));
  CHECK_OK(
      entry->completion->on_device->device().wait(gpu.consumer, *entry->completion->on_device));
  const OnDevice sum(*gpu.device, gpu.consumer, kBytes);
  CHECK_EQ(
      gpu.device->api().copy(device_address(sum.data()), memory->address, kBytes, gpu.consumer), 0);
  std::this_thread::sleep_for(50ms);  // time for a stream that fails to wait
  if (rank == 0) hold(gpu.producer, false);
  synchronize(gpu.producer);
  const std::vector<float> result = gpu.read(sum.data(), kCount);
  return values == std::vector<float>(kCount, 1.0F) && result == std::vector<float>(kCount, 10.0F);
}

EntryPtr gather(Engine& engine, Framework& gpu, float value) {
  const OnDevice tensor = gpu.tensor(std::vector<float>(kCount, value));
  const EntryPtr entry = gpu.entry("gather", tensor, kCount);
  entry->request.kind = Kind::kAllgather;
  CHECK_OK(run(engine, entry));
  CHECK(soon([&] { return entry->completion->released(); }));
  return entry;
}

// Gathered results that a held consumer copies out late, into memory that is used again. False when
// rank 0 finds the second result in the first one.
bool gather_before_a_held_consumer(int rank, Engine& engine, Framework& gpu) {
  const EntryPtr first = gather(engine, gpu, 1.0F);
  Completion::Output& output = first->completion->outputs[0];
  CudaDevice& device = first->completion->on_device->device();
  CHECK_OK(device.wait(gpu.consumer, *first->completion->on_device));
  if (rank == 0) hold(gpu.consumer, true);
  std::vector<float> result(kCount);
  {
    const CudaDevice::Current current(*gpu.device);
    CHECK_EQ(gpu.device->api().copy_to_host(result.data(), output.device.address(),
                                            kCount * sizeof(float), gpu.consumer),
             0);
  }
  output.pool->give_back(std::move(output.device), OnDevice::must(device.record(gpu.consumer)));
  std::thread release([&] {
    std::this_thread::sleep_for(100ms);
    if (rank == 0) hold(gpu.consumer, false);
  });
  (void)gather(engine, gpu, 2.0F);
  release.join();
  const CudaDevice::Current current(*gpu.device);
  synchronize(gpu.consumer);
  return result == std::vector<float>(kCount, 1.0F);
}

using Scenario = bool (*)(int rank, Engine& engine, Framework& gpu);

// True when rank 0 had the right result; `made` is the number of waits that it made.
bool is_right(Scenario scenario, int skip, int& made) {
  GpuWorld world;
  world.libraries = {counting_libraries()};
  std::atomic<bool> right{true};
  world.run([&](int rank, Engine& engine, Framework& gpu) {
    std::vector<float> none(1);
    CHECK_OK(run(engine, allreduce_entry("begin", none)));
    if (rank == 0) {
      waits = 0;
      skipped = skip;
    }
    const bool good = scenario(rank, engine, gpu);
    if (rank == 0) {
      right = good;
      made = waits;
      skipped = -1;
    }
    CHECK_OK(run(engine, allreduce_entry("end", none)));
  });
  return right;
}

void expect_every_wait_is_needed(Scenario scenario, std::vector<int> needed) {
  int made = 0;
  for (int i = 0; i < 3; ++i) CHECK(is_right(scenario, -1, made));
  for (const int skip : needed) {
    CHECK(skip < made);
    // ThreadSanitizer would rightly call a missing wait a race.
    for (int i = 0; i < 3 && !under_thread_sanitizer(); ++i) {
      CHECK(!is_right(scenario, skip, made));
    }
  }
}

}  // namespace

TEST(gpu_waits_for_the_producer_and_the_consumer_for_us) {
  // The wait of the communication stream, and the consumer's.
  expect_every_wait_is_needed(&reduce_behind_a_held_producer, {0, 1});
}

TEST(gpu_waits_for_readers_of_gradient_memory_before_and_after_a_collective) {
  expect_every_wait_is_needed(&reduce_into_gradient_memory_that_is_read_late, {0, 1});
}

TEST(gpu_waits_for_the_last_reader_of_a_result_before_its_memory_is_used_again) {
  // The tensor's, the consumer's and the second tensor's waits are 0, 1 and 2 or 3; the pool's wait
  // comes with the result.
  expect_every_wait_is_needed(&gather_before_a_held_consumer, {3});
}
