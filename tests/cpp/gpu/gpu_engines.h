// Worlds of whole engines whose tensors are on fake GPUs.
#pragma once

#include "cpp/engine/engine_worlds.h"
#include "gpu_worlds.h"
#include "support/inproc_world.h"

namespace hvdlite::testing {

using namespace std::chrono_literals;

template <typename Hook, typename... Arguments>
auto gpu_hook(const char* name, Arguments... arguments) {
  return fake_function<Hook>(kCuda, name)(arguments...);
}
inline void hold(CudaStream stream, bool held) {
  CHECK(gpu_hook<decltype(fake_hold_stream)>("fake_hold_stream", stream, held));
}
// Of one device, or of all.
inline FakeCounters gpu_counters(int device = -1) {
  FakeCounters counters{};
  gpu_hook<decltype(fake_counters)>("fake_counters", device, &counters);
  return counters;
}

// Stands for a framework on one GPU: it has streams of its own, and tensors.
class Framework {
 public:
  explicit Framework(int ordinal)
      : ordinal(ordinal),
        device(OnDevice::must(CudaDevice::open(OnDevice::must(gpu_libraries().cuda()), ordinal))) {
    const CudaDevice::Current current(*device);
    CHECK_EQ(device->api().stream_create(&producer, kCudaStreamNonBlocking, 0), 0);
    CHECK_EQ(device->api().stream_create(&consumer, kCudaStreamNonBlocking, 0), 0);
  }
  ~Framework() {
    const CudaDevice::Current current(*device);
    hold(producer, false);
    hold(consumer, false);
    for (CudaStream stream : {producer, consumer}) {
      synchronize(stream);
      CHECK_EQ(device->api().stream_destroy(stream), 0);
    }
  }
  // Written by the producer's stream, read by the consumer's.
  OnDevice tensor(const std::vector<float>& values) {
    OnDevice made(*device, producer, values.size() * sizeof(float));
    made.write(values.data(), values.size() * sizeof(float));
    const CudaDevice::Current current(*device);
    synchronize(producer);  // `values` may go
    return made;
  }
  std::vector<float> read(const void* from, std::size_t count) {
    std::vector<float> values(count);
    const CudaDevice::Current current(*device);
    CHECK_EQ(device->api().copy_to_host(values.data(), device_address(from), count * sizeof(float),
                                        consumer),
             0);
    synchronize(consumer);
    return values;
  }
  EntryPtr entry(const std::string& name, const OnDevice& tensor, std::size_t count,
                 ReduceOp op = ReduceOp::kSum) const {
    std::vector<float> shape(count);
    EntryPtr made = allreduce_entry(name, shape, op);
    made->request.tensors[0].device = DeviceType::kGpu;
    made->inputs = {tensor.data()};
    made->outputs = {tensor.data()};
    made->gpu = GpuSource{ordinal, producer, nullptr};
    return made;
  }
  // Submits the entry, waits until the device has been given it, and makes the consumer wait for
  // it.
  Status run(Engine& engine, const EntryPtr& entry, CudaDevice* waiting = nullptr) {
    HVDLITE_RETURN_IF_ERROR(testing::run(engine, entry));
    CudaDevice& by = waiting == nullptr ? *device : *waiting;
    return by.wait(consumer, *entry->completion->on_device);
  }

  const int ordinal;
  const std::shared_ptr<CudaDevice> device;
  CudaStream producer = nullptr;
  CudaStream consumer = nullptr;
};

struct GpuWorld {
  Hosts hosts = {0, 0};
  Config config = gpu_config();
  std::vector<GpuLibraries> libraries = {gpu_libraries()};  // by rank; the last one for the rest
  bool share_device = false;                                // all ranks use the first GPU

  // Runs body(rank, engine, framework) on a thread per rank; the engines shut down together.
  void run(const std::function<void(int, Engine&, Framework&)>& body) const {
    auto fabrics = make_inproc_world(hosts, config);
    CHECK_OK(fabrics.status());
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      threads.emplace_back([&, rank] {
        Framework framework(share_device ? 0 : static_cast<int>(rank));
        std::unique_ptr<Fabric> fabric = std::move(fabrics.value()[rank]);
        auto host = std::make_unique<HostBackend>(*fabric, config);
        Engine engine(std::move(fabric), std::move(host), config,
                      libraries[std::min(rank, libraries.size() - 1)]);
        body(static_cast<int>(rank), engine, framework);
        engine.shutdown();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

inline bool contains(const Status& status, const std::string& text) {
  if (status.message().find(text) != std::string::npos) return true;
  std::fprintf(stderr, "'%s' is not in: %s\n", text.c_str(), status.message().c_str());
  return false;
}

// Checks by an allreduce of host memory that the world is usable.
inline void check_usable(Engine& engine) {
  std::vector<float> values(3, 1.0F);
  CHECK_OK(run(engine, allreduce_entry("usable", values)));
  CHECK_EQ(values[2], static_cast<float>(engine.size()));
}

// One entry of several tensors.
inline EntryPtr grouped(const Framework& gpu, const std::vector<OnDevice>& tensors,
                        std::size_t count) {
  EntryPtr entry = gpu.entry("group", tensors[0], count);
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    entry->request.tensors.push_back(entry->request.tensors[0]);
    entry->inputs.push_back(tensors[i].data());
    entry->outputs.push_back(tensors[i].data());
  }
  return entry;
}

}  // namespace hvdlite::testing
