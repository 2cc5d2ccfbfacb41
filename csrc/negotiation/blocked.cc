#include "negotiation/blocked.h"

namespace hvdlite {

Bytes encode(const Blocked& blocked) {
  Writer writer;
  writer.put(blocked.submitted);
  writer.put(blocked.pending);
  writer.put(static_cast<std::uint32_t>(blocked.keys.size()));
  for (std::size_t i = 0; i < blocked.keys.size(); ++i) {
    writer.put_text(blocked.keys[i]);
    const std::string place = i < blocked.places.size() ? blocked.places[i] : "";
    writer.put_text(place.size() <= kMaxPlaceBytes ? place : "");
  }
  return writer.take();
}

bool decode(std::span<const std::byte> bytes, Blocked& blocked) {
  Reader reader(bytes);
  blocked.submitted = reader.get<std::uint64_t>();
  blocked.pending = reader.get<std::uint32_t>();
  blocked.keys.resize(reader.get_count(2 * sizeof(std::uint16_t)));
  blocked.places.resize(blocked.keys.size());
  for (std::size_t i = 0; i < blocked.keys.size(); ++i) {
    blocked.keys[i] = reader.get_text(kMaxKeyBytes);
    blocked.places[i] = reader.get_text(kMaxPlaceBytes);
  }
  return !reader.bad() && reader.at_end();
}

}  // namespace hvdlite
