// Rounds for tests, as the negotiator makes them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/entry.h"

namespace hvdlite::testing {

// All-reduces of the world, each of one tensor of so many floats.
inline Round round_of(const std::vector<std::string>& names, std::int64_t floats) {
  Round round;
  for (const std::string& name : names) {
    Agreed agreed;
    agreed.entry = std::make_shared<Entry>();
    agreed.entry->request.name = name;
    agreed.entry->request.tensors = {{name, DataType::kFloat32, {floats}}};
    round.entries.push_back(std::move(agreed));
  }
  return round;
}

}  // namespace hvdlite::testing
