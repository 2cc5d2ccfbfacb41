#include "host/plane.h"

#include <algorithm>
#include <string>

#include "kernels/pieces.h"

namespace hvdlite {

HostPlane::HostPlane(Fabric& fabric, const Config& config)
    : fabric_(fabric), tunables_(tunables_of(config)), staging_(fabric), exchange_(fabric) {}

void HostPlane::trace_to(Trace& trace, const char* row) {
  trace_ = &trace;
  trace_row_ = row;
  staging_.trace_to(trace_, row);
}

std::uint64_t HostPlane::chunk_bytes(const HostLayout& layout) const {
  const std::int64_t wanted = layout.spans_hosts() ? tunables_.tcp_chunk : tunables_.shm_chunk;
  return std::clamp<std::uint64_t>(static_cast<std::uint64_t>(std::max<std::int64_t>(wanted, 0)),
                                   kCutBytes, staging_.buffer_bytes());
}

Result<std::uint64_t> HostPlane::share_bytes(const HostLayout& layout, std::size_t parts) const {
  const std::uint64_t room = std::max(chunk_bytes(layout), parts * kCutBytes);
  if (room > staging_.buffer_bytes()) {
    return Status(StatusCode::kInternal,
                  "staging buffers of " + std::to_string(staging_.buffer_bytes()) +
                      " bytes are too small for " + std::to_string(parts) +
                      " parts; raise HVDLITE_SHM_CHUNK or HVDLITE_TCP_CHUNK");
  }
  return room / parts / kCutBytes * kCutBytes;
}

void HostPlane::send(int rank, std::span<const std::byte> bytes) {
  if (to_other_hosts_ != nullptr && !topology().same_host(rank)) *to_other_hosts_ += bytes.size();
  exchange_.send(rank, bytes);
}

Status HostPlane::await_received(std::uint64_t mark) {
  const TraceSpan traced = part("exchange");
  return exchange_.await_received(mark);
}

Status HostPlane::await_moved(std::uint64_t mark) {
  const TraceSpan traced = part("exchange");
  return exchange_.await_moved(mark);
}

Status HostPlane::exchange_with_ranks(std::span<const Transfer> transfers, Patience patience,
                                      const char* operation) {
  if (transfers.empty()) return Status();
  exchange_.begin(patience, operation);
  for (const Transfer& transfer : transfers) {
    send(transfer.rank, transfer.outgoing);
    exchange_.receive(transfer.rank, transfer.incoming);
  }
  return await_moved(exchange_.mark());
}

}  // namespace hvdlite
