#include "gpu_worlds.h"

namespace hvdlite::testing {

void for_every_gpu_world(const EveryBody& body) {
  const auto run = [&](const Hosts& hosts, const Config& config,
                       const std::string& nccl = "libnccl.so.2") {
    run_gpus(
        hosts, config,
        [&](int rank, Backend& backend, const Group& world) {
          body(static_cast<int>(hosts.size()), rank, backend, world);
        },
        gpu_libraries(nccl));
  };
  Config config = gpu_config();
  for (const Hosts& hosts : {Hosts{0}, Hosts{0, 0}, Hosts{0, 1, 1}, Hosts{0, 0, 0, 0}}) {
    run(hosts, config);
  }
  config.fusion_threshold = 4096;  // batches take several rounds of the fusion buffer
  run({0, 0}, config);
  run({0, 0, 0}, config);
  run({0, 0, 0}, config, "nowhere");  // through the host
}

}  // namespace hvdlite::testing
