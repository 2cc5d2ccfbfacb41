// Gradient memory that the ranks of a host share: parts of a rank's segment in which Python keeps
// gradients from step to step (hvdlite/torch/bucket_memory.py). The ranks of the host
// have mapped it, so an all-reduce reads its tensors where they lie (host/shared_gradients.h). Only
// the owner writes to it.
//
// A fabric has the area of its rank. A part ends when its last holder lets go of it, and may
// outlive the fabric. Threads: any may call lend() and let go of a part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>

#include "base/mutex.h"
#include "transport/segment.h"

namespace hvdlite {

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
