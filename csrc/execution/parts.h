// What an engine is made of, besides the world that runs it. The engine owns it; its world, the
// executor and the batches borrow it. Each part says in its own header which threads may call it;
// "the runner" is the thread that runs collectives just now (world.h).
#pragma once

#include <memory>
#include <utility>

#include "backend/backend.h"
#include "base/config.h"
#include "execution/counters.h"
#include "execution/tensor_queue.h"
#include "execution/timeline.h"
#include "gpu/gpu_plane.h"
#include "negotiation/process_set.h"
#include "transport/fabric.h"

namespace hvdlite {

struct EngineParts {
  EngineParts(std::unique_ptr<Fabric> its_fabric, std::unique_ptr<Backend> its_backend,
              Config its_config, GpuLibraries gpu_libraries, std::unique_ptr<Trace> its_trace)
      : rank(its_fabric ? its_fabric->topology.rank : 0),
        size(its_fabric ? its_fabric->topology.size : 1),
        config(std::move(its_config)),
        trace(std::move(its_trace)),
        fabric(std::move(its_fabric)),
        backend(std::move(its_backend)),
        gpus(*backend, fabric.get(), config, std::move(gpu_libraries)),
        sets(size) {
    backend->trace_to(*trace);
  }

  const int rank;
  const int size;
  const Config config;
  const std::unique_ptr<Trace> trace;  // before all that writes to it
  Timeline timeline{*trace};
  const std::unique_ptr<Fabric> fabric;    // null in a world of one
  const std::unique_ptr<Backend> backend;  // the data plane of tensors in host memory
  GpuPlane gpus;
  ProcessSets sets;
  TensorQueue queue{timeline};
  Counters counters;  // the runner counts up, any thread reads
};

}  // namespace hvdlite
