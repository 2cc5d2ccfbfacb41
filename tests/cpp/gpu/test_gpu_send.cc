// Whole engines that send tensors of fake GPUs: by NCCL, and through the host.
#include "cpp/engine/send_entries.h"
#include "gpu_engines.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

EntryPtr gpu_send(Framework& gpu, const OnDevice& tensor, int source, int destination,
                  std::size_t count) {
  EntryPtr entry = gpu.entry("x", tensor, count);
  entry->request.kind = Kind::kSend;
  entry->request.ranks = {source, destination};
  return entry;
}

void check_gpu_pairs(const GpuWorld& world) {
  world.run([](int rank, Engine& engine, Framework& gpu) {
    for (const std::size_t count : {1, 1000, 300001}) {
      for (int source = 0; source < engine.size(); ++source) {
        for (int destination = 0; destination < engine.size(); ++destination) {
          if (source == destination || (rank != source && rank != destination)) continue;
          const OnDevice tensor = gpu.tensor(std::vector<float>(count, static_cast<float>(rank)));
          CHECK_OK(gpu.run(engine, gpu_send(gpu, tensor, source, destination, count)));
          CHECK_EQ(gpu.read(tensor.data(), count).back(), static_cast<float>(source));
        }
      }
    }
    const OnDevice tensor = gpu.tensor(std::vector<float>(100, 1.0F));
    CHECK_OK(gpu.run(engine, gpu.entry("sum", tensor, 100)));
    CHECK_EQ(gpu.read(tensor.data(), 100).back(), static_cast<float>(engine.size()));
  });
}

}  // namespace

TEST(engine_gpu_sends_between_every_two_ranks) {
  for (const Hosts& hosts : {Hosts{0, 0}, Hosts{0, 0, 1}}) check_gpu_pairs({hosts});
}

TEST(engine_gpu_sends_through_the_host_without_nccl) {
  GpuWorld world{{0, 0, 1}};
  world.libraries = {gpu_libraries("nowhere")};
  check_gpu_pairs(world);
}

TEST(engine_gpu_refuses_a_send_from_a_gpu_to_the_host) {
  GpuWorld{}.run([](int rank, Engine& engine, Framework& gpu) {
    const OnDevice tensor = gpu.tensor(std::vector<float>(10));
    std::vector<float> host(10);
    const EntryPtr entry =
        rank == 0 ? gpu_send(gpu, tensor, 0, 1, 10) : send_entry("x", 0, 1, host);
    const Status status = run(engine, entry);
    CHECK_STATUS(status, StatusCode::kMismatch);
    CHECK(has(status.message(), "ranks disagree about the device"));
  });
}
