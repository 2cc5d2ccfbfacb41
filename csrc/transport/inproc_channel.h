// A channel between two ranks that are threads of one process: two rings in plain memory.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "transport/byte_ring.h"
#include "transport/channel.h"
#include "transport/waiter.h"

namespace hvdlite {

// What both ends share.
struct InprocLink {
  explicit InprocLink(std::size_t capacity);
  std::vector<std::byte> memory;  // of both rings, aligned by hand
  std::size_t capacity;
  std::byte* ring(int direction);
  std::atomic<bool> closed[2] = {false, false};  // by end
};

class InprocChannel : public Channel {
 public:
  // `end` is 0 or 1. `peer_bell` outlives the channel.
  InprocChannel(int peer, int end, std::shared_ptr<InprocLink> link, Bell peer_bell);
  ~InprocChannel() override { close(); }

  int peer() const override { return peer_; }
  Result<std::size_t> try_write(std::span<const std::byte> bytes) override;
  Result<std::size_t> try_read(std::span<std::byte> bytes) override;
  Status attach(Waiter& waiter) override;
  void close() override;

 private:
  bool gone() const;
  int peer_;
  int end_;
  std::shared_ptr<InprocLink> link_;
  ByteRing inbound_;
  ByteRing outbound_;
  Bell peer_bell_;
};

}  // namespace hvdlite
