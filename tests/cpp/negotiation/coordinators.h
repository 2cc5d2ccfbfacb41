// Coordinators and requests for tests.
#pragma once

#include <string>

#include "negotiation/coordinator.h"
#include "negotiation/process_set.h"
#include "negotiation/stall_monitor.h"

namespace hvdlite::testing {

inline constexpr Coordinator::TimePoint kStart{};

inline Group world_of(int size) {
  ProcessSets sets(size);
  return *sets.get(0);
}

// One that never warns of a stall, unless a test gives it other settings.
inline Config quiet_config(std::int64_t cache = 100) {
  Config config;
  config.cache_capacity = cache;
  config.stall_warning = config.stall_shutdown = 0;
  return config;
}

inline Coordinator make_coordinator(int size, std::int64_t cache = 100) {
  return Coordinator(size, quiet_config(cache));
}

// A coordinator with a monitor that warns after ten seconds.
struct Stalling {
  explicit Stalling(int size, double shutdown = Config().stall_shutdown)
      : config(config_of(shutdown)),
        coordinator(make_coordinator(size)),
        monitor(config, coordinator, &stalls) {}
  static Config config_of(double shutdown) {
    Config config;
    config.stall_warning = 10;
    config.stall_shutdown = shutdown;
    return config;
  }
  const Config config;
  Coordinator coordinator;
  Stalls stalls;
  StallMonitor monitor;
};

inline Request join_request() {
  Request request;
  request.kind = Kind::kJoin;
  request.name = kJoinName;
  return request;
}

inline Request allreduce_of(const std::string& name, std::int64_t count, std::uint32_t set = 0) {
  Request request;
  request.name = name;
  request.process_set = set;
  request.tensors = {{name, DataType::kFloat32, {count}}};
  return request;
}

}  // namespace hvdlite::testing
