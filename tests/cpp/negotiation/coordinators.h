// Coordinators and requests for tests.
#pragma once

#include <string>

#include "negotiation/coordinator.h"
#include "negotiation/process_set.h"

namespace hvdlite::testing {

inline constexpr Coordinator::TimePoint kStart{};

inline Group world_of(int size) {
  ProcessSets sets(size);
  return *sets.get(0);
}

inline Coordinator make_coordinator(int size, std::size_t cache = 100) {
  Coordinator coordinator(size, cache);
  coordinator.add_set(world_of(size));
  return coordinator;
}

inline Request allreduce_of(const std::string& name, std::int64_t count, std::uint32_t set = 0) {
  Request request;
  request.name = name;
  request.process_set = set;
  request.tensors = {{name, DataType::kFloat32, {count}}};
  return request;
}

}  // namespace hvdlite::testing
