// What an engine is made of, besides its runner. The engine owns it; its negotiator and its
// executor borrow it. Each part says in its own header which threads may call it; "the runner" is
// the thread that runs collectives just now (engine.h).
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "engine/commit_book.h"
#include "engine/late_results.h"
#include "engine/live.h"
#include "engine/tensor_queue.h"
#include "engine/timeline.h"
#include "gpu/gpu_plane.h"
#include "host/backend.h"
#include "negotiation/process_set.h"
#include "transport/fabric.h"

namespace hvdlite {

// What a world of an elastic job has from its predecessor.
struct ElasticWorld {
  int epoch = 0;
  std::vector<std::pair<int, std::vector<int>>> process_sets;  // ids ascend; not the world's own
};

struct EngineParts {
  EngineParts(std::unique_ptr<Fabric> its_fabric, std::unique_ptr<Backend> its_backend,
              Config its_config, GpuLibraries gpu_libraries, std::unique_ptr<Trace> its_trace,
              const ElasticWorld* elastic, int highest_set, std::int64_t clock_offset)
      : rank(its_fabric ? its_fabric->topology.rank : 0),
        size(its_fabric ? its_fabric->topology.size : 1),
        epoch(elastic ? elastic->epoch : 0),
        config(std::move(its_config)),
        trace(std::move(its_trace)),
        fabric(std::move(its_fabric)),
        backend(std::move(its_backend)),
        gpus(*backend, fabric.get(), config, std::move(gpu_libraries)),
        sets(size, highest_set),
        live(size, config.lateness_interval, clock_offset) {
    backend->trace_to(*trace);
    backend->count_in(counters.bytes_to_other_hosts, counters.bytes_unstaged);
    if (elastic == nullptr) return;
    if (fabric != nullptr) commits = std::make_shared<CommitBook>();
    for (const auto& [id, ranks] : elastic->process_sets) sets.add(id, ranks);
    if (rank > 0) return;
    live.events.add("world", -1, "",
                    "world " + std::to_string(epoch) + " begins with " + std::to_string(size) +
                        (size == 1 ? " rank" : " ranks"));
  }

  const int rank;
  const int size;
  const int epoch;
  const Config config;
  const std::unique_ptr<Trace> trace;  // before all that writes to it
  Timeline timeline{*trace};
  const std::unique_ptr<Fabric> fabric;    // A world of one has none.
  const std::unique_ptr<Backend> backend;  // the data plane of tensors in host memory
  GpuPlane gpus;
  ProcessSets sets;
  TensorQueue queue{timeline};
  // Elastic jobs with several ranks; shared with the pending operations.
  std::shared_ptr<CommitBook> commits;
  Counters counters;  // the runner counts up, any thread reads
  LiveFigures live;
  LateResults late{rank, size, queue};
};

}  // namespace hvdlite
