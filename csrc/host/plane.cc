#include "host/plane.h"

#include <algorithm>
#include <string>

#include "host/silence.h"
#include "kernels/pieces.h"
#include "kernels/sum_tree.h"

namespace hvdlite {

namespace {

// A connection that the kernel gave up says how long the peer was silent.
Status lost(int rank, const Status& why, const char* operation) {
  return lost_peer(rank, operation, why.code() == StatusCode::kTimeout ? ": " + why.message() : "");
}

}  // namespace

Exchange& Exchange::begin(Patience patience, const char* operation) {
  for (const int rank : active_) {
    Stream& stream = streams_[static_cast<std::size_t>(rank)];
    stream.outgoing.clear();
    stream.incoming.clear();
    stream.active = false;
  }
  active_.clear();
  patience_ = patience;
  operation_ = operation;
  mark_ = 0;
  broken_ = Status();
  return *this;
}

Exchange::Stream& Exchange::stream_of(int rank) {
  Stream& stream = streams_[static_cast<std::size_t>(rank)];
  if (!stream.active) active_.push_back(rank);
  stream.active = true;
  return stream;
}

void Exchange::send(int rank, std::span<const std::byte> bytes) {
  if (to_other_hosts_ != nullptr && !fabric_.topology.same_host(rank)) {
    *to_other_hosts_ += bytes.size();
  }
  if (!bytes.empty()) stream_of(rank).outgoing.items.push_back({bytes, mark_ + 1});
}

void Exchange::receive(int rank, std::span<std::byte> bytes) {
  if (!bytes.empty()) stream_of(rank).incoming.items.push_back({bytes, mark_ + 1});
}

Status Exchange::write_some(Channel& channel, Queue<const std::byte>& queue) {
  for (; !queue.empty(); ++queue.first) {
    std::span<const std::byte>& bytes = queue.items[queue.first].bytes;
    while (!bytes.empty()) {
      HVDLITE_ASSIGN_OR_RETURN(std::size_t written, channel.try_write(bytes));
      if (written == 0) return Status();
      moved_ += written;
      bytes = bytes.subspan(written);
    }
  }
  queue.clear();
  return Status();
}

Status Exchange::read_some(Channel& channel, Queue<std::byte>& queue, std::uint64_t mark) {
  for (; !queue.moved(mark); ++queue.first) {
    std::span<std::byte>& bytes = queue.items[queue.first].bytes;
    while (!bytes.empty()) {
      HVDLITE_ASSIGN_OR_RETURN(std::size_t got, channel.try_read(bytes));
      if (got == 0) return Status();
      moved_ += got;
      bytes = bytes.subspan(got);
    }
  }
  if (queue.empty()) queue.clear();
  return Status();
}

bool Exchange::come_to(std::uint64_t mark, bool sent) {
  bool all = true;
  for (const int rank : active_) {
    Stream& stream = streams_[static_cast<std::size_t>(rank)];
    Channel& channel = *fabric_.data[static_cast<std::size_t>(rank)];
    Status status = write_some(channel, stream.outgoing);
    if (status.ok()) status = read_some(channel, stream.incoming, mark);
    if (!status.ok()) {
      broken_ = lost(rank, status, operation_);
      return true;
    }
    if (stream.incoming.moved(mark) && (!sent || stream.outgoing.moved(mark))) continue;
    waiting_for_ = rank;
    owes_ = stream.incoming.moved(mark) ? "takes no data" : "sends no data";
    all = false;
  }
  return all;
}

void Exchange::send_some() {
  for (const int rank : active_) {
    if (!broken_.ok()) return;
    Stream& stream = streams_[static_cast<std::size_t>(rank)];
    const Status status =
        write_some(*fabric_.data[static_cast<std::size_t>(rank)], stream.outgoing);
    if (!status.ok()) broken_ = lost(rank, status, operation_);
  }
}

Status Exchange::await(std::uint64_t mark, bool sent) {
  const TraceSpan traced(trace_, trace_row_, "exchange");
  if (!broken_.ok()) return broken_;
  const auto ready = [&] { return come_to(mark, sent); };
  // The channel itself says when a peer is gone: its control channel may end while data is still on
  // its way.
  const auto failed = [] { return Status(); };
  Silence silence(fabric_, patience_);
  while (true) {
    const std::uint64_t before = moved_;
    const Status status = fabric_.waiter->wait(ready, failed, silence.next());
    if (status.code() != StatusCode::kTimeout) return status.ok() ? broken_ : status;
    // A slow link is not a dead peer: only a wait without any progress ends it.
    if (moved_ > before) {
      silence.moved();
    } else if (silence.gives_up(waiting_for_, operation_, owes_)) {
      return silent_peer(waiting_for_, operation_);
    }
  }
}

Status Exchange::transfer(std::span<const Transfer> transfers, Patience patience,
                          const char* operation) {
  if (transfers.empty()) return Status();
  begin(patience, operation);
  for (const Transfer& transfer : transfers) {
    send(transfer.rank, transfer.outgoing);
    receive(transfer.rank, transfer.incoming);
  }
  return await_moved(mark());
}

HostPlane::HostPlane(Fabric& fabric, const Config& config)
    : fabric_(fabric), tunables_(tunables_of(config)), staging_(fabric), exchange_(fabric) {}

void HostPlane::trace_to(Trace& trace, const char* row) {
  trace_ = &trace;
  trace_row_ = row;
  staging_.trace_to(trace_, row);
  exchange_.trace_to(trace, row);
}

const HostLayout& HostPlane::layout_of(const Group& group) {
  const Topology& topology = fabric_.topology;
  HostLayout& layout = layouts_[group.id];
  if (!layout.hosts.empty() && layout.locals.group.generation == group.generation) return layout;
  layout = {};
  std::map<int, std::size_t> index;  // A host of the topology has one in layout.hosts.
  for (const int rank : group.ranks) {
    const auto [found, first] = index.try_emplace(topology.host_of[rank], layout.hosts.size());
    if (first) layout.hosts.emplace_back();
    layout.hosts[found->second].push_back(rank);
  }
  layout.host = index.at(topology.host_of[topology.rank]);
  layout.locals.group = {group.id, layout.hosts[layout.host], group.lane, group.generation};
  layout.locals.index = layout.locals.group.index_of(topology.rank);
  layout.drivers = static_cast<int>(group.ranks.size());
  for (const auto& ranks : layout.hosts) {
    layout.drivers = std::min(layout.drivers, static_cast<int>(ranks.size()));
  }
  for (const auto& ranks : layout.hosts) {
    layout.counts.push_back(static_cast<int>(ranks.size()));
    if (layout.driver()) layout.peers.push_back(ranks[layout.locals.index]);
  }
  layout.tree = tree_over_hosts(layout.counts);
  return layout;
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

}  // namespace hvdlite
