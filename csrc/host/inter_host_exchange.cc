#include "host/inter_host_exchange.h"

namespace hvdlite {
namespace {

// From shorter runs on, a copy into a buffer costs less than system calls for each run.
constexpr std::uint64_t kLongRun = 32 << 10;  // bytes
// Up to so many bytes for the other hosts together, a piece goes to all of them as a whole.
constexpr std::uint64_t kLittle = 64 << 10;

}  // namespace

bool InterHostExchange::travels_from_tensors(const AllreduceBatch& batch, Range range) {
  if (batch.types.cast() || batch.pieces.prescaled()) return false;
  std::uint64_t runs = 0;
  batch.pieces.for_each(range, [&](auto&&...) { ++runs; });
  return runs <= 1 || range.count() * batch.element_bytes / runs >= kLongRun;
}

template <typename Visit>
void InterHostExchange::for_each_span(const Slot& slot, Range part, Visit visit) const {
  const std::uint64_t element_bytes = batch_.element_bytes;
  if (slot.lies_at != nullptr) {
    std::byte* at = slot.lies_at + (part.begin - slot.range.begin) * element_bytes;
    return visit(at, at, part.count() * element_bytes);
  }
  batch_.pieces.for_each(part,
                         [&](const Piece&, const std::byte* input, std::byte* output, std::uint64_t,
                             std::uint64_t count) { visit(input, output, count * element_bytes); });
}

void InterHostExchange::scatter(Slot& slot, bool alone) {
  const HostLayout& layout = batch_.layout;
  const std::size_t hosts = layout.hosts.size();
  slot.little = alone && slot.range.count() * batch_.element_bytes * (hosts - 1) <= kLittle;
  slot.parts.clear();
  for (std::size_t h = 0; h < hosts; ++h) {
    slot.parts.push_back(slot.little ? slot.range : batch_.part(slot.range, hosts, h));
  }
  const std::size_t own_bytes = slot.parts[layout.host].count() * batch_.element_bytes;
  if (slot.received.size() < hosts * own_bytes) slot.received.resize(hosts * own_bytes);
  for (std::size_t h = 0; h < hosts; ++h) {
    if (h == layout.host) continue;
    for_each_span(slot, slot.parts[h], [&](const std::byte* input, std::byte*, std::size_t bytes) {
      plane_.send(layout.peers[h], {input, bytes});
    });
    exchange_.receive(layout.peers[h], {slot.received.data() + h * own_bytes, own_bytes});
  }
  slot.scattered = exchange_.mark();
  exchange_.send_some();
}

Status InterHostExchange::reduce(Slot& slot) {
  const HostLayout& layout = batch_.layout;
  const Range own = slot.parts[layout.host];
  // What is sent from an output must have left before the result overwrites it.
  HVDLITE_RETURN_IF_ERROR(slot.little ? plane_.await_moved(slot.scattered)
                                      : plane_.await_received(slot.scattered));
  std::byte* lies_at = slot.lies_at;
  if (lies_at != nullptr) lies_at += (own.begin - slot.range.begin) * batch_.element_bytes;
  std::vector<const void*> sources;
  for (std::size_t h = 0; h < layout.hosts.size(); ++h) {
    const std::byte* received = slot.received.data() + h * own.count() * batch_.element_bytes;
    sources.push_back(h == layout.host ? lies_at : received);
  }
  batch_.finish(own, sources, lies_at);
  slot.gathered = slot.scattered;
  if (slot.little) return Status();
  for (std::size_t h = 0; h < layout.hosts.size(); ++h) {
    if (h == layout.host) continue;
    for_each_span(slot, own, [&](const std::byte*, std::byte* output, std::size_t bytes) {
      plane_.send(layout.peers[h], {output, bytes});
    });
    for_each_span(slot, slot.parts[h], [&](const std::byte*, std::byte* output, std::size_t bytes) {
      exchange_.receive(layout.peers[h], {output, bytes});
    });
  }
  slot.gathered = exchange_.mark();
  exchange_.send_some();
  return Status();
}

Status InterHostExchange::take(Slot& slot) {
  HVDLITE_RETURN_IF_ERROR(plane_.await_moved(slot.gathered));
  if (slot.lies_at == nullptr) return Status();
  if (slot.little) {
    if (batch_.types.cast()) batch_.copy_out(slot.range, slot.lies_at);
    return Status();
  }
  for (std::size_t h = 0; h < slot.parts.size(); ++h) {
    // Where nothing is cast, reduce() has written this host's part to the outputs.
    if (h == batch_.layout.host && !batch_.types.cast()) continue;
    const Range part = slot.parts[h];
    batch_.copy_out(part, slot.lies_at + (part.begin - slot.range.begin) * batch_.element_bytes);
  }
  return Status();
}

}  // namespace hvdlite
