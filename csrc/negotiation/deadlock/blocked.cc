#include "negotiation/deadlock/blocked.h"

namespace hvdlite {

Bytes encode(const Blocked& blocked) {
  Writer writer;
  writer.put(blocked.submitted);
  writer.put(blocked.pending);
  writer.put(static_cast<std::uint32_t>(blocked.keys.size()));
  for (const std::string& key : blocked.keys) writer.put_text(key);
  return writer.take();
}

bool decode(std::span<const std::byte> bytes, Blocked& blocked) {
  Reader reader(bytes);
  blocked.submitted = reader.get<std::uint64_t>();
  blocked.pending = reader.get<std::uint32_t>();
  blocked.keys.resize(reader.get_count(sizeof(std::uint16_t)));
  for (std::string& key : blocked.keys) key = reader.get_text(kMaxKeyBytes);
  return !reader.bad() && reader.at_end();
}

}  // namespace hvdlite
