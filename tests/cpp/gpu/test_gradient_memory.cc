// Gradient memory of fake GPUs, in whole engines: gradients are reduced in place, and the memory is
// registered with NCCL once and freed in order.
#include <thread>

#include "gpu/device_workspace.h"
#include "gpu_engines.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

using Counts = std::vector<std::size_t>;

// Gradient memory that holds tensors of float32 as torch's buckets do.
class Bucket {
 public:
  Bucket(Engine& engine, Framework& gpu, Counts counts, std::size_t gap = 0)
      : gpu_(gpu), counts_(std::move(counts)) {
    std::size_t bytes = 0;
    for (const std::size_t count : counts_) {
      offsets_.push_back(bytes);
      bytes += aligned(count * sizeof(float)) + gap;
    }
    memory_ = OnDevice::must(engine.allocate_gradient_memory(gpu.ordinal, bytes));
  }
  std::byte* part(std::size_t i) const {
    return reinterpret_cast<std::byte*>(memory_->address + offsets_[i]);
  }
  // A grouped sum into the gradient memory, of tensors elsewhere or of its own content.
  EntryPtr entry(const std::vector<OnDevice>* inputs = nullptr) const {
    EntryPtr made = allreduce_entry("bucket", none_);
    made->request.tensors.clear();
    made->inputs.clear();
    made->outputs.clear();
    made->gpu = GpuSource{gpu_.ordinal, gpu_.producer, nullptr};
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      const auto dim = static_cast<std::int64_t>(counts_[i]);
      made->request.tensors.push_back({"part", DataType::kFloat32, {dim}});
      made->request.tensors.back().device = DeviceType::kGpu;
      made->inputs.push_back(inputs == nullptr ? part(i) : (*inputs)[i].data());
      made->outputs.push_back(part(i));
    }
    return made;
  }
  std::vector<OnDevice> gradients(float value) const {
    std::vector<OnDevice> all;
    for (const std::size_t count : counts_) {
      all.push_back(gpu_.tensor(std::vector<float>(count, value)));
    }
    return all;
  }
  void expect(float value) const {
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      CHECK(gpu_.read(part(i), counts_[i]) == std::vector<float>(counts_[i], value));
    }
  }
  CudaPointer address() const { return memory_->address; }
  void let_go() { memory_.reset(); }

 private:
  Framework& gpu_;
  const Counts counts_;
  std::vector<std::size_t> offsets_;
  GradientMemory::Holder memory_;
  static inline std::vector<float> none_;
};

// Kernels that the rank's own device launches for an entry.
std::int64_t launches_of(Engine& engine, Framework& gpu, const EntryPtr& entry) {
  const std::int64_t before = gpu_counters(gpu.ordinal).kernel_launches;
  CHECK_OK(gpu.run(engine, entry));
  return gpu_counters(gpu.ordinal).kernel_launches - before;
}

void reduce_another(Engine& engine, Framework& gpu) {
  const OnDevice tensor = gpu.tensor({1.0F});
  CHECK_OK(gpu.run(engine, gpu.entry("another", tensor, 1)));
  CHECK_EQ(gpu.read(tensor.data(), 1)[0], static_cast<float>(engine.size()));
}

// Memory that has ended is freed soon after another batch, when the runner sees that batch's end.
void expect_freed(Engine& engine, Framework& gpu, const FakeCounters& before) {
  reduce_another(engine, gpu);
  CHECK(soon(
      [&] {
        const FakeCounters now = gpu_counters(gpu.ordinal);
        return now.live_registrations == before.live_registrations &&
               now.live_allocations == before.live_allocations;
      },
      10s));
}

// Reduces twice, first from other tensors, then in place, and checks the launches of each.
void expect_reduced(Engine& engine, Framework& gpu, const Bucket& bucket, std::int64_t packed,
                    std::int64_t in_place) {
  const auto size = static_cast<float>(engine.size());
  const std::vector<OnDevice> gradients = bucket.gradients(3.0F);
  CHECK_EQ(launches_of(engine, gpu, bucket.entry(&gradients)), packed);
  bucket.expect(3.0F * size);
  CHECK_EQ(launches_of(engine, gpu, bucket.entry()), in_place);
  bucket.expect(3.0F * size * size);
  for (const OnDevice& gradient : gradients) CHECK_EQ(gpu.read(gradient.data(), 1)[0], 3.0F);
}

}  // namespace

TEST(gradient_memory_is_packed_once_never_unpacked_and_otherwise_reduced_in_place) {
  GpuWorld{{0, 0, 1}}.run([](int, Engine& engine, Framework& gpu) {
    expect_reduced(engine, gpu, Bucket(engine, gpu, {100, 33, 7}), 1, 0);
    expect_reduced(engine, gpu, Bucket(engine, gpu, {50}), 1, 0);
    expect_reduced(engine, gpu, Bucket(engine, gpu, Counts(113, 5)), 2, 0);  // a table's length
  });
}

TEST(gradient_memory_is_scaled_in_place) {
  GpuWorld{}.run([](int rank, Engine& engine, Framework& gpu) {
    const Bucket bucket(engine, gpu, {100, 33});
    const std::vector<OnDevice> gradients = bucket.gradients(3.0F);
    const auto scaled = [&](const std::vector<OnDevice>* inputs, double pre, double post) {
      EntryPtr entry = bucket.entry(inputs);
      entry->request.prescale = pre;
      entry->request.postscale = post;
      return launches_of(engine, gpu, entry);
    };
    CHECK_EQ(scaled(&gradients, 0.5, 1.0), 1);
    bucket.expect(3.0F);
    CHECK_EQ(scaled(nullptr, 0.5, 4.0), 2);
    bucket.expect(12.0F);
    EntryPtr weighted = bucket.entry();
    weighted->request.op = ReduceOp::kAverage;
    weighted->request.weighted = true;
    weighted->weight = rank == 0 ? 0.0 : 3.0;
    CHECK_OK(gpu.run(engine, weighted));
    bucket.expect(12.0F);
  });
}

TEST(gradient_memory_with_other_gaps_or_shared_batches_gives_the_same_through_the_fusion_buffer) {
  GpuWorld{}.run([](int rank, Engine& engine, Framework& gpu) {
    expect_reduced(engine, gpu, Bucket(engine, gpu, {100, 33, 7}, /*gap=*/16), 2, 2);
    expect_reduced(engine, gpu, Bucket(engine, gpu, {100, 33, 7}, /*gap=*/8), 2, 2);
    // Each member decides for itself: one has gradient memory without gaps, the other with gaps.
    const Bucket bucket(engine, gpu, {100, 33, 7}, rank == 0 ? 0 : 32);
    expect_reduced(engine, gpu, bucket, rank == 0 ? 1 : 2, rank == 0 ? 0 : 2);
  });
}

TEST(gradient_memory_larger_than_the_fusion_buffer_is_reduced_in_its_rounds) {
  GpuWorld world;
  world.config.fusion_threshold = 4096;
  world.run([](int, Engine& engine, Framework& gpu) {
    // 112 tensors fill a launch; their gaps make two rounds, of which each is packed alone.
    expect_reduced(engine, gpu, Bucket(engine, gpu, Counts(300, 1)), 4, 0);
    expect_reduced(engine, gpu, Bucket(engine, gpu, {5000}), 1, 0);
  });
}

TEST(gradient_memory_is_registered_once_with_each_communicator_until_it_ends) {
  const FakeCounters before = gpu_counters();
  GpuWorld{{0, 0, 1}}.run([](int rank, Engine& engine, Framework& gpu) {
    reduce_another(engine, gpu);  // opens everything; registers the fusion buffer
    const FakeCounters start = gpu_counters(gpu.ordinal);
    Bucket bucket(engine, gpu, {100, 33, 7});
    Bucket unused(engine, gpu, {10});
    for (int i = 0; i < 3; ++i) expect_reduced(engine, gpu, bucket, 1, 0);
    CHECK_EQ(gpu_counters(gpu.ordinal).registrations, start.registrations + 1);
    // While rank 0 has joined, the others have another communicator.
    if (rank != 0) {
      for (int i = 0; i < 2; ++i) CHECK_OK(gpu.run(engine, bucket.entry()));
      CHECK_EQ(gpu_counters(gpu.ordinal).registrations,
               start.registrations + 3);  // a fusion buffer, too
    }
    CHECK_OK(run(engine, join_entry()));
    CHECK_EQ(gpu_counters(gpu.ordinal).live_registrations, start.live_registrations + 1);
    bucket.let_go();
    unused.let_go();
    expect_freed(engine, gpu, start);
    expect_reduced(engine, gpu, Bucket(engine, gpu, {100, 33, 7}), 1, 0);
  });
  const FakeCounters after = gpu_counters();
  CHECK_EQ(after.registration_faults, before.registration_faults);
  CHECK_EQ(after.live_registrations, before.live_registrations);
  CHECK_EQ(after.live_allocations, before.live_allocations);
}

TEST(gradient_memory_that_nccl_does_not_register_gives_the_same_through_the_fusion_buffer) {
  set_gpu_option("FAKE_FAIL_ncclCommRegister", "5", 1);
  GpuWorld{}.run([](int rank, Engine& engine, Framework& gpu) {
    expect_reduced(engine, gpu, Bucket(engine, gpu, {100, 33}), rank == 0 ? 1 : 2,
                   rank == 0 ? 0 : 2);
    expect_reduced(engine, gpu, Bucket(engine, gpu, {50}), rank == 0 ? 1 : 0, 0);
  });
  set_gpu_option("FAKE_FAIL_ncclCommRegister", nullptr, 1);
}

TEST(gradient_memory_is_any_output_where_there_is_no_nccl_or_no_peer) {
  GpuWorld world;
  world.libraries = {gpu_libraries("nowhere")};
  const auto body = [](int, Engine& engine, Framework& gpu) {
    const Bucket bucket(engine, gpu, {100, 33, 7});
    const std::vector<OnDevice> gradients = bucket.gradients(2.0F);
    CHECK_OK(gpu.run(engine, bucket.entry(&gradients)));
    bucket.expect(2.0F * static_cast<float>(engine.size()));
  };
  world.run(body);
  GpuWorld{}.run([](int rank, Engine& engine, Framework& gpu) {
    const std::uint32_t alone = add_set(engine, {0});
    if (rank == 0) {
      const Bucket bucket(engine, gpu, {100, 33, 7});
      const std::vector<OnDevice> gradients = bucket.gradients(2.0F);
      CHECK_EQ(launches_of(engine, gpu, in_set(bucket.entry(&gradients), alone)), 1);
      CHECK_EQ(launches_of(engine, gpu, in_set(bucket.entry(), alone)), 0);
      bucket.expect(2.0F);
    }
    std::vector<float> none(1);
    CHECK_OK(run(engine, allreduce_entry("end", none)));
  });
}

TEST(gradient_memory_ends_when_no_stream_reads_it_any_more) {
  GpuWorld{}.run([](int, Engine& engine, Framework& gpu) {
    Bucket bucket(engine, gpu, {1000});
    const std::vector<OnDevice> gradients = bucket.gradients(2.0F);
    CHECK_OK(gpu.run(engine, bucket.entry(&gradients)));
    reduce_another(engine, gpu);
    hold(gpu.consumer, true);
    std::vector<float> late(1000);
    {
      const CudaDevice::Current current(*gpu.device);
      CHECK_EQ(gpu.device->api().copy_to_host(late.data(), bucket.address(), 4000, gpu.consumer),
               0);
    }
    std::atomic<bool> ended{false};
    std::thread holder([&] {
      bucket.let_go();
      ended = true;
    });
    std::this_thread::sleep_for(50ms);
    CHECK(!ended);
    hold(gpu.consumer, false);
    holder.join();
    CHECK(late == std::vector<float>(1000, 4.0F));
    reduce_another(engine, gpu);
  });
}

TEST(gradient_memory_may_outlive_its_engine) {
  const FakeCounters before = gpu_counters();
  std::vector<Bucket> kept;
  std::vector<std::unique_ptr<Framework>> frameworks;
  for (int i = 0; i < 2; ++i) frameworks.push_back(std::make_unique<Framework>(i));
  Mutex mutex;
  GpuWorld{}.run([&](int rank, Engine& engine, Framework&) {
    Framework& gpu = *frameworks[static_cast<std::size_t>(rank)];
    Bucket bucket(engine, gpu, {100, 33});
    const std::vector<OnDevice> gradients = bucket.gradients(2.0F);
    CHECK_OK(gpu.run(engine, bucket.entry(&gradients)));
    bucket.expect(4.0F);
    MutexLock lock(mutex);
    kept.push_back(std::move(bucket));
  });
  for (const Bucket& bucket : kept) bucket.expect(4.0F);
  CHECK_EQ(gpu_counters().live_registrations, before.live_registrations);
  CHECK_EQ(gpu_counters().live_allocations, before.live_allocations + 2);
  kept.clear();
  frameworks.clear();
  const FakeCounters after = gpu_counters();
  CHECK_EQ(after.live_allocations, before.live_allocations);
  CHECK_EQ(after.registration_faults, before.registration_faults);
}

TEST(gradient_memory_that_does_not_fit_names_its_size) {
  set_gpu_option("FAKE_CUDA_MEMORY", "1000000", 1);
  GpuWorld{}.run([](int rank, Engine& engine, Framework& gpu) {
    if (rank == 1) {
      const Status status = engine.allocate_gradient_memory(gpu.ordinal, 2'000'000).status();
      CHECK_STATUS(status, StatusCode::kOutOfMemory);
      CHECK(status.message().find("allocating 2000000 bytes") != std::string::npos);
    }
    CHECK_STATUS(engine.allocate_gradient_memory(77, 10).status(), StatusCode::kInvalidArgument);
    std::vector<float> none(1);
    CHECK_OK(run(engine, allreduce_entry("usable", none)));
  });
  set_gpu_option("FAKE_CUDA_MEMORY", nullptr, 1);
}
