// Entries of sends, for tests of whole engines.
#pragma once

#include <string>
#include <vector>

#include "cpp/engine/engine_worlds.h"

namespace hvdlite::testing {

// What both ranks submit; `data` is read by the source and written by the destination.
inline EntryPtr send_entry(const std::string& name, int source, int destination, void* data,
                           std::int64_t count, DataType dtype = DataType::kFloat32) {
  auto entry = std::make_shared<Entry>();
  entry->request.kind = Kind::kSend;
  entry->request.name = name;
  entry->request.ranks = {source, destination};
  entry->request.tensors = {{name, dtype, {count}}};
  entry->inputs = {data};
  entry->outputs = {data};
  return entry;
}

inline EntryPtr send_entry(const std::string& name, int source, int destination,
                           std::vector<float>& values) {
  return send_entry(name, source, destination, values.data(),
                    static_cast<std::int64_t>(values.size()));
}

}  // namespace hvdlite::testing
