// The memory that one rank shares with the ranks of its host, and what lies where in it.
//
//   header     magic, version, layout numbers, the sleeping flag of the owner's Waiter
//   rings      one inbound byte ring per rank of the host (control channels; own index unused)
//   lanes      one cache line of counters per process set: written by the owner, read by peers
//   slots      two staging slots for collectives, each `slot_bytes` long, page-aligned
//
// The owner creates the memfd (create_segment), touches it first, and passes it to its peers, who
// map it. Sealed against shrinking, so that no peer can make another one fault. In-process worlds
// use the same layout over private memory, one mapping for all threads (ThreadSanitizer follows
// addresses). Sizes are 64-bit throughout.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/config.h"
#include "base/status.h"
#include "os/fd.h"
#include "os/shm.h"

namespace hvdlite {

inline constexpr int kLaneCount = 1024;  // process sets that there can be at once
inline constexpr int kSlotCount = 2;     // alternate, so that a peer may still read the other one

// Progress of the owner in the collectives of one process set. Each counter only grows, also when a
// later set takes over the lane.
struct alignas(64) Lane {
  std::atomic<std::uint64_t> arrived;  // chunks whose input the owner has published
  std::atomic<std::uint64_t> reduced;  // chunks whose slice the owner has reduced
  std::atomic<std::uint64_t> done;     // chunks whose result the owner has taken
};

struct SegmentLayout {
  std::uint64_t local_size = 1;
  std::uint64_t ring_bytes = 0;  // capacity of one inbound ring
  std::uint64_t slot_bytes = 0;  // capacity of one slot
  std::uint64_t total_bytes() const;
  static SegmentLayout make(int local_size, const Config& config);
};

class Segment {
 public:
  // A sealed memfd of layout.total_bytes(), header written. Call once per rank, then map it.
  static Result<Fd> create(const SegmentLayout& layout);
  // Maps a memfd and checks seal, header, version and size: kInternal when they do not fit.
  static Result<std::shared_ptr<Segment>> map(const Fd& memfd);
  // Private memory of the same layout, for threads as ranks.
  static Result<std::shared_ptr<Segment>> in_process(const SegmentLayout& layout);

  const SegmentLayout& layout() const { return layout_; }
  std::atomic<std::uint32_t>* sleeping() const;
  std::byte* inbound_ring(int local_index) const;  // memory of a ByteRing of layout().ring_bytes
  Lane& lane(int index) const;
  std::byte* slot(int index) const;

 private:
  Segment(Mapping mapping, SegmentLayout layout) : mapping_(std::move(mapping)), layout_(layout) {}
  Mapping mapping_;  // owner of the bytes (os/shm.h)
  SegmentLayout layout_;
};

}  // namespace hvdlite
