// The memory that one rank shares with the ranks of its host, and its layout.
//
//   header     magic, version, layout numbers, the sleeping flag of the owner's Waiter
//   rings      one inbound byte ring per rank of the host (control channels; own index unused)
//   data rings likewise, larger, for the data channels; memory that nobody uses costs nothing
//   lanes      one cache line of counters per process set: written by the owner, read by peers
//   buffers    two staging buffers for collectives, each `buffer_bytes` long, page-aligned
//   gradients  room for the owner's gradient memory (GradientArea), `gradient_bytes` long
//
// The owner creates the memfd (Segment::create), touches it first, and passes it to its peers,
// which map it. The memfd is sealed against shrinking, so that no peer can make another one fault.
// Worlds of threads have one mapping for all threads, because ThreadSanitizer follows addresses.
// Sizes are 64-bit throughout. Fabrics own their Segments. waiter.h, byte_ring.h and
// host/staging.h say which thread may touch which part.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>

#include "base/config.h"
#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"
#include "transport/byte_ring.h"

namespace hvdlite {

inline constexpr int kLaneCount = 1024;    // process sets that can exist at once
inline constexpr int kStagingBuffers = 2;  // staging buffers; a peer may still read one of them
                                           // while the owner writes the other

// The owner's progress in the collectives of one process set. Each counter only grows, even when a
// later process set takes over the lane.
struct alignas(64) Lane {
  std::atomic<std::uint64_t> arrived;  // chunks whose input the owner has published
  std::atomic<std::uint64_t> reduced;  // chunks whose slice the owner has reduced
  std::atomic<std::uint64_t> done;     // chunks whose result the owner has taken
  // In the step that uses this buffer, the owner's tensors lie here (host/staging.h).
  struct Place {
    std::atomic<std::uint64_t> begin;
    std::atomic<std::uint64_t> check;
  } places[kStagingBuffers];
};

struct SegmentLayout {
  std::uint64_t local_size = 1;
  std::uint64_t ring_bytes = 0;       // capacity of one inbound ring
  std::uint64_t data_ring_bytes = 0;  // capacity of one of the data channels
  std::uint64_t buffer_bytes = 0;     // capacity of one staging buffer
  std::uint64_t gradient_bytes = 0;   // capacity of the gradients
  std::uint64_t total_bytes() const;
  static SegmentLayout make(int local_size, const Config& config);
};

class Segment {
 public:
  // Makes a sealed memfd of layout.total_bytes() and writes its header. A rank calls this once, and
  // maps the memfd then.
  static Result<Fd> create(const SegmentLayout& layout);
  // Maps a memfd, and checks its seal, header, version and size: kInternal when they do not fit.
  static Result<std::shared_ptr<Segment>> map(const Fd& memfd);

  const SegmentLayout& layout() const { return layout_; }
  std::atomic<std::uint32_t>* sleeping() const;
  // The rings into which the rank of this host with that index writes.
  ByteRing control_ring(int local_index) const;
  ByteRing data_ring(int local_index) const;
  Lane& lane(int index) const;
  std::byte* staging_buffer(int index) const;
  std::span<std::byte> gradients() const;
  // Gives pages of the gradients back to the system, page by page.
  void discard_gradients(std::uint64_t begin, std::uint64_t bytes) const;

 private:
  Segment(Mapping mapping, SegmentLayout layout) : mapping_(std::move(mapping)), layout_(layout) {}
  Mapping mapping_;  // owner of the bytes (base/fd.h)
  SegmentLayout layout_;
};

// Gradient memory that the ranks of a host share: parts of a rank's segment in which Python keeps
// gradients from step to step (hvdlite/torch/bucket_memory.py). The ranks of the host
// have mapped it, so an all-reduce reads its tensors where they lie (host/allreduce.h). Only
// the owner writes to it.
//
// A fabric has the area of its rank. A part ends when its last holder lets go of it, and may
// outlive the fabric. Threads: any may call lend() and let go of a part.
class GradientArea : public std::enable_shared_from_this<GradientArea> {
 public:
  using Part = std::shared_ptr<const std::span<std::byte>>;

  explicit GradientArea(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  // Returns memory with any contents, page-aligned; null where there is no room for it.
  Part lend(std::size_t bytes);

 private:
  void take_back(std::uint64_t begin);

  const std::shared_ptr<Segment> segment_;
  Mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> lent_ HVDLITE_GUARDED_BY(mutex_);  // ends by begin
};

}  // namespace hvdlite
